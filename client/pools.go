package client

import (
	"context"
	"errors"
	"fmt"
	"os"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/localapi"
)

// oobSpace holds the descriptors of one frame.
var oobSpace = unix.CmsgSpace(localapi.MaxPools * 4)

// descriptors returns the descriptors in control messages; they are the
// caller's also when it errs.
func descriptors(oob []byte) ([]int, error) {
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, fmt.Errorf("control message: %w", err)
	}
	var fds []int
	for _, m := range messages {
		if m.Header.Level != unix.SOL_SOCKET || m.Header.Type != unix.SCM_RIGHTS || len(m.Data)%4 != 0 { // ParseUnixRights would read past the end
			return fds, fmt.Errorf("control message of level %d and type %d with %d bytes", m.Header.Level, m.Header.Type, len(m.Data))
		}
		rights, err := unix.ParseUnixRights(&m)
		if err != nil {
			return fds, fmt.Errorf("control message: %w", err)
		}
		fds = append(fds, rights...)
	}
	return fds, nil
}

func closeAll(fds []int) {
	for _, fd := range fds {
		unix.Close(fd)
	}
}

// mapPools maps what came with the hello's answer.
func (c *Client) mapPools(ans *localapi.HelloAnswer, fds []int) error {
	if len(fds) != len(ans.Pools) {
		return fmt.Errorf("%d descriptors came for %d pools", len(fds), len(ans.Pools))
	}
	for i, name := range ans.Pools {
		var err error
		switch name {
		case localapi.StagingPool:
			c.staging, err = mapPool(fds[i], ans.StagingCapacity, ans.SlotBytes, unix.PROT_READ|unix.PROT_WRITE)
		case localapi.ReceivePool:
			c.receive, err = mapPool(fds[i], ans.ReceiveCapacity, ans.SlotBytes, unix.PROT_READ)
		default:
			err = errors.New("unknown")
		}
		if err != nil {
			return fmt.Errorf("%s pool: %w", name, err)
		}
	}
	return nil
}

func mapPool(fd int, slots, slotBytes int64, prot int) ([]byte, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, os.NewSyscallError("fstat", err)
	}
	if slots < 1 || slotBytes < 1 || st.Size/slotBytes < slots {
		return nil, fmt.Errorf("%d slots of %d bytes in %d bytes", slots, slotBytes, st.Size)
	}
	b, err := unix.Mmap(fd, 0, int(st.Size), prot, unix.MAP_SHARED)
	if err != nil {
		return nil, os.NewSyscallError("mmap", err)
	}
	unix.Madvise(b, unix.MADV_DONTDUMP) // prompts do not belong in a core dump; advice only
	return b, nil
}

func (c *Client) unmap() {
	for _, b := range [][]byte{c.staging, c.receive} {
		if b != nil {
			unix.Munmap(b)
		}
	}
	c.staging, c.receive = nil, nil
}

// Staging returns the memory of a staging slot, Info().SlotBytes long and
// writable. It may be written from Stage until Submit or Unstage, and never
// after Close. It panics on a slot that is not in the pool.
func (c *Client) Staging(slot Slot) []byte { return c.view(c.staging, slot, c.info.StagingCapacity) }

// Receive returns the memory of a receive slot, read-only: a write to it
// crashes the process. It may be read from Claim until Release, and never after
// Close. It panics on a slot that is not in the pool.
func (c *Client) Receive(slot Slot) []byte { return c.view(c.receive, slot, c.info.ReceiveCapacity) }

func (c *Client) view(pool []byte, slot Slot, slots int) []byte {
	if pool == nil || int(slot) >= slots {
		panic(fmt.Sprintf("slot %d of a pool of %d that is mapped: %t", slot, slots, pool != nil))
	}
	at := int64(slot) * c.info.SlotBytes
	return pool[at : at+c.info.SlotBytes : at+c.info.SlotBytes]
}

// touchStep is how much of a pool is touched at a time.
const touchStep = 16 << 20

// Touch makes this process's mapping of the staging pool present, so that the
// first write to a slot is not slow. It changes no byte, may run beside any
// other call but Close, and returns early when ctx ends. On kernels before
// 5.14 it does nothing.
func (c *Client) Touch(ctx context.Context) error {
	for at := 0; at < len(c.staging); at += touchStep {
		if err := ctx.Err(); err != nil {
			return err
		}
		err := unix.Madvise(c.staging[at:min(at+touchStep, len(c.staging))], unix.MADV_POPULATE_WRITE)
		switch {
		case errors.Is(err, syscall.EINVAL):
			return nil
		case err != nil && !errors.Is(err, syscall.EINTR):
			return fault.New(fault.Internal, "touch the staging pool: %s", err)
		}
	}
	return nil
}
