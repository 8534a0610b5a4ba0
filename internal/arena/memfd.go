package arena

import (
	"errors"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"
)

// memfd makes an unsealed memory file of the given size. Its mode keeps other
// users from opening it anew, through a descriptor that was given to them for
// reading, for writing.
func memfd(name string, size int64, flags int) (int, error) {
	name = "berth " + name
	fd, err := unix.MemfdCreate(name, flags|unix.MFD_CLOEXEC|unix.MFD_NOEXEC_SEAL)
	if errors.Is(err, unix.EINVAL) { // before Linux 6.3
		fd, err = unix.MemfdCreate(name, flags|unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	}
	if err != nil {
		return -1, err
	}
	if err = unix.Fchmod(fd, 0o600); err == nil {
		err = unix.Ftruncate(fd, size)
	}
	if err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

func seal(fd, seals int) error {
	_, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals)
	return err
}

// readOnly opens a memfd anew for reading. A duplicate would share the access
// mode of the original.
func readOnly(name string, fd int) (int, error) {
	ro, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", fd), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, explain(name, "open for reading", 0, err)
	}
	return ro, nil
}

// hugePageSize returns the system's default huge page size, 0 if it has none.
func hugePageSize() int {
	kb := meminfo("Hugepagesize:")
	return int(kb << 10)
}

// meminfo returns a field of /proc/meminfo in kB, 0 if it cannot be read.
func meminfo(field string) uint64 {
	for line := range strings.Lines(readFile("/proc/meminfo")) {
		if rest, ok := strings.CutPrefix(line, field); ok {
			var kb uint64
			if _, err := fmt.Sscan(rest, &kb); err == nil {
				return kb
			}
		}
	}
	return 0
}

func mlockOnFault(b []byte) error {
	_, _, e := unix.Syscall(unix.SYS_MLOCK2, addr(b), uintptr(len(b)), unix.MLOCK_ONFAULT)
	if e != 0 {
		return e
	}
	return nil
}
