// Package nixllink is the data link over NIXL's C library, which is loaded at
// run time by builds with the tag nixl (CGO_ENABLED=1). It exchanges real bytes
// with LMCache's PD backends in both directions, and links Berth agents too.
//
// A write is one-sided: the sender's library writes into the receiver's memory
// and learns when that is done; the receiver sees nothing and cannot fence it.
// So Caps are OneSided without an exact fence.
//
// Parts, of which only lib_nixl.go needs the library:
//
//	pages, metadata  what peers send, parsed by hand; it is never unpickled
//	owner            the one goroutine that calls the library, and polls it
//	receiver         registers the receive pool, answers handshakes
//	sender, conn     handshakes with a receiver of either kind; writes
//	find             where the library is
//
// A receiver hands nothing that a peer sent to the library. A sender must hand
// it the metadata of the receiver that it was told to write to.
//
// The library reports neither a dead peer nor a completed disconnect, so each
// link keeps a connection whose end says that the peer is gone: to a Berth
// receiver the one of its hello, to an LMCache receiver that of the handshake
// on its init port.
package nixllink
