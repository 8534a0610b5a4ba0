package tcplink

import (
	"encoding/binary"
	"fmt"

	"github.com/berthkv/berth/internal/kv"
)

// Layouts of PROTOCOL.md, "Data plane": little-endian, no padding.
const (
	magic       = "BTD1" // Berth, tcp data, version 1
	helloBytes  = 4 + 16 + 16 + 16
	answerBytes = 4 + 4 + 16
	frameBytes  = 4 + 8 + 4
)

// hello opens a data connection.
type hello struct {
	receiver kv.Incarnation // whom the sender means
	owner    kv.Incarnation // the sender
	secret   kv.Secret
}

func (h hello) append(b []byte) []byte {
	b = append(b, magic...)
	b = append(b, h.receiver[:]...)
	b = append(b, h.owner[:]...)
	return append(b, h.secret[:]...)
}

func parseHello(b *[helloBytes]byte) (h hello, ok bool) {
	copy(h.receiver[:], b[4:])
	copy(h.owner[:], b[20:])
	copy(h.secret[:], b[36:])
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
	// statusTooMany: the owner has all the connections it may have, or it has one
	// and there is no room for more.
	statusTooMany
)

func (s status) String() string {
	switch s {
	case statusOK:
		return "ok"
	case statusOtherReceiver:
		return "another receiver incarnation"
	case statusRefused:
		return "owner or secret refused"
	case statusTooMany:
		return "too many data connections"
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

// frame is the header before a chunk's bytes.
type frame struct {
	slot   kv.SlotID
	gen    kv.Generation
	length uint32
}

func (f frame) put(b *[frameBytes]byte) {
	binary.LittleEndian.PutUint32(b[0:], uint32(f.slot))
	binary.LittleEndian.PutUint64(b[4:], uint64(f.gen))
	binary.LittleEndian.PutUint32(b[12:], f.length)
}

func parseFrame(b *[frameBytes]byte) frame {
	return frame{
		slot:   kv.SlotID(binary.LittleEndian.Uint32(b[0:])),
		gen:    kv.Generation(binary.LittleEndian.Uint64(b[4:])),
		length: binary.LittleEndian.Uint32(b[12:]),
	}
}
