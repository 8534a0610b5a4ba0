// Package tcplink moves chunks over TCP: the default link between hosts.
//
// A sender keeps several data connections to a receiver. Each begins with a
// hello that the receiver answers; then only the sender speaks, one frame a
// chunk, header and bytes in one vectored write, and the receiver reads each
// frame from the socket straight into its slot:
//
//	Write ─► queue ─► one writer a connection ─► socket ─► one reader a connection ─► slot ─► Landed
//	        (shared)         (parallel)                          (parallel)
//
// There is no acknowledgement: the answer to the Commit is it. A frame that is
// stale, or whose chunk has landed, is read and thrown away. The fence is
// exact: a revoke interrupts the reader that fills the slot, and the slot is
// fenced when that reader has let go; the connection lives on.
//
// Lock order: the receiver's mu, then the gate's; a conn's mu is alone. No
// callback is called and nothing is read or written under a lock; setting a
// deadline or closing a socket, which does not wait, is.
package tcplink
