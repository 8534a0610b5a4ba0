package shmlink

import (
	"encoding/binary"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/berthkv/berth/internal/kv"
)

// Layouts of PROTOCOL.md, "Data plane": little-endian, no padding.
const (
	magic       = "BSM1" // Berth, shared memory, version 1
	helloBytes  = 4 + 16 + 16 + 16 + 4 + 8
	answerBytes = 4 + 4 + 16
	// descriptors come with the hello: the staging pool, the generation words.
	descriptors = 2
)

// hello opens the link.
type hello struct {
	receiver  kv.Incarnation // whom the sender means
	owner     kv.Incarnation // the sender
	secret    kv.Secret
	slots     uint32
	slotBytes uint64
}

func (h hello) append(b []byte) []byte {
	b = append(b, magic...)
	b = append(b, h.receiver[:]...)
	b = append(b, h.owner[:]...)
	b = append(b, h.secret[:]...)
	b = binary.LittleEndian.AppendUint32(b, h.slots)
	return binary.LittleEndian.AppendUint64(b, h.slotBytes)
}

func parseHello(b *[helloBytes]byte) (h hello, ok bool) {
	copy(h.receiver[:], b[4:])
	copy(h.owner[:], b[20:])
	copy(h.secret[:], b[36:])
	h.slots = binary.LittleEndian.Uint32(b[52:])
	h.slotBytes = binary.LittleEndian.Uint64(b[56:])
	return h, string(b[:4]) == magic
}

// parseRights returns the descriptors in the control messages of one read, all
// of which the caller must close, also on an error.
func parseRights(oob []byte) (fds []int, err error) {
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, err
	}
	for _, m := range msgs {
		if m.Header.Level != unix.SOL_SOCKET || m.Header.Type != unix.SCM_RIGHTS {
			err = fmt.Errorf("control message of level %d and type %d", m.Header.Level, m.Header.Type)
			continue
		}
		if len(m.Data)%4 != 0 { // ParseUnixRights would read past the end
			err = fmt.Errorf("descriptors in %d bytes", len(m.Data))
			continue
		}
		got, e := unix.ParseUnixRights(&m)
		if e != nil {
			err = e
			continue
		}
		fds = append(fds, got...)
	}
	return fds, err
}

// status is the receiver's word on a hello.
type status uint32

const (
	statusOK status = iota
	// statusOtherReceiver: the path belongs to another incarnation, as when
	// the sender is on another host than the one it means.
	statusOtherReceiver
	// statusRefused: the owner is not allowed here, or the secret is wrong;
	// which of the two is not told.
	statusRefused
	// statusLayout: slot_bytes is not the receiver's, or slots is out of range.
	statusLayout
	// statusMemory: the descriptors are not what they must be, or cannot be mapped.
	statusMemory
)

func (s status) String() string {
	switch s {
	case statusOK:
		return "ok"
	case statusOtherReceiver:
		return "another receiver incarnation"
	case statusRefused:
		return "owner or secret refused"
	case statusLayout:
		return "slots or slot_bytes refused"
	case statusMemory:
		return "descriptors refused: they must be two read-only memfds, sealed against shrinking (and the second against writing), large enough"
	}
	return fmt.Sprintf("status %d", uint32(s))
}

// answer is what comes back for a hello.
type answer struct {
	status   status
	receiver kv.Incarnation // who is here
}

func (a answer) append(b []byte) []byte {
	b = append(b, magic...)
	b = binary.LittleEndian.AppendUint32(b, uint32(a.status))
	return append(b, a.receiver[:]...)
}

func parseAnswer(b *[answerBytes]byte) (a answer, ok bool) {
	a.status = status(binary.LittleEndian.Uint32(b[4:]))
	copy(a.receiver[:], b[8:])
	return a, string(b[:4]) == magic
}
