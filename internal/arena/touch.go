package arena

import (
	"errors"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// touchStep is how much is populated between two looks at stop: a few
// milliseconds of work.
const touchStep = 4 << 20

// touch gives every page of the pool its memory, lowest first, so that no
// transfer pays for it: the first pass over fresh pages is an order of
// magnitude slower than the second. It changes no byte, and so may run while
// slots are being written.
func (p *Pool) touch() {
	defer close(p.done)
	reported := 0
	for off := 0; off < len(p.mapping); {
		select {
		case <-p.stop:
			return
		default:
		}
		end := min(off+int(roundUp(touchStep, p.page)), len(p.mapping))
		if err := populate(p.mapping[off:end], p.page); err != nil {
			if p.cfg.Progress != nil {
				p.cfg.Progress(reported, p.explain("touch", err))
			}
			return
		}
		off = end
		slots := min(int(int64(off)/p.cfg.SlotBytes), p.cfg.Slots)
		p.touched.Store(int64(slots))
		if p.cfg.Progress != nil && slots > reported {
			p.cfg.Progress(slots, nil)
		}
		reported = slots
	}
}

// populate makes the pages of b present and writable.
func populate(b []byte, page int) error {
	for {
		err := unix.Madvise(b, unix.MADV_POPULATE_WRITE)
		switch {
		case errors.Is(err, unix.EINTR), errors.Is(err, unix.EAGAIN):
			continue
		case errors.Is(err, unix.EINVAL): // before Linux 5.14
			writeTouch(b, page)
			return nil
		}
		return err
	}
}

// writeTouch writes one word of each page back to itself, atomically: whoever
// writes that word at the same time loses nothing.
func writeTouch(b []byte, page int) {
	for i := 0; i < len(b); i += page {
		atomic.AddUint32((*uint32)(unsafe.Pointer(&b[i])), 0)
	}
}
