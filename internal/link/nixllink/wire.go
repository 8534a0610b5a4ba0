package nixllink

import (
	"encoding/binary"
	"fmt"
	"io"

	"github.com/berthkv/berth/internal/kv"
)

// Layouts of PROTOCOL.md, "Data plane": little-endian, no padding.
const (
	magic       = "BNX1" // Berth, nixl, version 1
	helloBytes  = 4 + 16 + 16 + 16 + 8
	answerBytes = 4 + 4 + 16 + 4 + 8 + 4
	maxMetadata = 1 << 20 // of an agent
)

// hello opens the link between Berth agents.
type hello struct {
	receiver  kv.Incarnation // whom the sender means
	owner     kv.Incarnation // the sender
	secret    kv.Secret
	slotBytes uint64
}

func (h hello) append(b []byte) []byte {
	b = append(b, magic...)
	b = append(b, h.receiver[:]...)
	b = append(b, h.owner[:]...)
	b = append(b, h.secret[:]...)
	return binary.LittleEndian.AppendUint64(b, h.slotBytes)
}

func parseHello(b *[helloBytes]byte) (h hello, ok bool) {
	copy(h.receiver[:], b[4:])
	copy(h.owner[:], b[20:])
	copy(h.secret[:], b[36:])
	h.slotBytes = binary.LittleEndian.Uint64(b[52:])
	return h, string(b[:4]) == magic
}

// status is the receiver's word on a hello.
type status uint32

const (
	statusOK status = iota
	// statusOtherReceiver: the address belongs to another incarnation.
	statusOtherReceiver
	// statusRefused: the owner is not allowed here, or the secret is wrong;
	// which of the two is not told.
	statusRefused
	// statusLayout: slot_bytes is not the receiver's.
	statusLayout
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
		return "slot_bytes refused"
	}
	return fmt.Sprintf("status %d", uint32(s))
}

// answer is what comes back for a hello. After status 0 the metadata follows.
type answer struct {
	status   status
	receiver kv.Incarnation // who is here
	slots    uint32
	addr     uint64 // of slot 0 in the receiver
	metadata []byte // of its NIXL agent
}

func (a answer) append(b []byte) []byte {
	b = append(b, magic...)
	b = binary.LittleEndian.AppendUint32(b, uint32(a.status))
	b = append(b, a.receiver[:]...)
	b = binary.LittleEndian.AppendUint32(b, a.slots)
	b = binary.LittleEndian.AppendUint64(b, a.addr)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(a.metadata)))
	return append(b, a.metadata...)
}

func readAnswer(r io.Reader) (a answer, err error) {
	var b [answerBytes]byte
	if _, err := io.ReadFull(r, b[:]); err != nil {
		return a, fmt.Errorf("no answer to the hello: %w", err)
	}
	if string(b[:4]) != magic {
		return a, fmt.Errorf("the answer to the hello is of another protocol")
	}
	a.status = status(binary.LittleEndian.Uint32(b[4:]))
	copy(a.receiver[:], b[8:])
	a.slots = binary.LittleEndian.Uint32(b[24:])
	a.addr = binary.LittleEndian.Uint64(b[28:])
	n := binary.LittleEndian.Uint32(b[36:])
	if n > maxMetadata {
		return a, fmt.Errorf("agent metadata of %d bytes, at most %d", n, maxMetadata)
	}
	a.metadata = make([]byte, n)
	if _, err := io.ReadFull(r, a.metadata); err != nil {
		return a, fmt.Errorf("agent metadata: %w", err)
	}
	return a, nil
}
