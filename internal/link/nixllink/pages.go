package nixllink

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/berthkv/berth/internal/kv"
)

// memory says where pages are, in NIXL's numbers.
type memory uint32

const (
	dram memory = 0
	vram memory = 1
)

// page is one slot of a registered pool.
type page struct{ addr, length, device uint64 }

// pageList is what LMCache's peers tell each other about their pools: a Python
// pickle of one object that holds NIXL's serial form. There is one shape of it,
// which is matched byte by byte.
type pageList struct {
	module string // the Python module of the peer's bindings
	memory memory
	pages  []page
}

const pageBytes = 24

// modules are the bindings' names that NIXL has had, the newest first.
var modules = []string{"nixl_cu13._bindings", "nixl_cu12._bindings", "nixl._bindings"}

// Opcodes of the pickle's one shape.
const (
	pickleStart = "\x80\x04\x95" // protocol 4, a frame: its length follows
	pickleClass = "\x94\x8c\x0dnixlXferDList\x94\x93\x94)\x81\x94"
	pickleEnd   = "\x94b."
	shortString = 0x8c
	shortBytes  = 'C'
	longBytes   = 'B'
	serialStart = "nixlSerDes|"
	listTag     = "nixlDList"
	listKind    = "nixlBDList"
)

// appendPages writes a list in the shape that NIXL's Python bindings write.
func appendPages(b []byte, l *pageList) []byte {
	serial := append([]byte(nil), serialStart...)
	serial = appendField(serial, listTag, []byte(listKind))
	serial = appendField(serial, "t", binary.LittleEndian.AppendUint32(nil, uint32(l.memory)))
	serial = appendField(serial, "n", binary.LittleEndian.AppendUint64(nil, uint64(len(l.pages))))
	pages := make([]byte, 0, len(l.pages)*pageBytes)
	for _, p := range l.pages {
		pages = binary.LittleEndian.AppendUint64(pages, p.addr)
		pages = binary.LittleEndian.AppendUint64(pages, p.length)
		pages = binary.LittleEndian.AppendUint64(pages, p.device)
	}
	serial = appendField(serial, "", pages)

	frame := append([]byte{shortString, byte(len(l.module))}, l.module...)
	frame = append(frame, pickleClass...)
	if len(serial) < 256 {
		frame = append(frame, shortBytes, byte(len(serial)))
	} else {
		frame = append(frame, longBytes)
		frame = binary.LittleEndian.AppendUint32(frame, uint32(len(serial)))
	}
	frame = append(frame, serial...)
	frame = append(frame, pickleEnd...)
	b = append(b, pickleStart...)
	b = binary.LittleEndian.AppendUint64(b, uint64(len(frame)))
	return append(b, frame...)
}

func appendField(b []byte, tag string, value []byte) []byte {
	b = append(b, tag...)
	b = binary.LittleEndian.AppendUint64(b, uint64(len(value)))
	b = append(b, value...)
	return append(b, '|')
}

// parsePages reads a list. Nothing of b is kept.
func parsePages(b []byte) (*pageList, error) {
	s := scanner{rest: b}
	s.want(pickleStart)
	if n := s.u64(); s.err == nil && n != uint64(len(s.rest)) {
		s.fail("frame of %d bytes, %d are there", n, len(s.rest))
	}
	s.want(string([]byte{shortString}))
	module := string(s.take(uint64(s.u8())))
	if s.err == nil && !slices.Contains(modules, module) {
		s.fail("module %q, one of %s is wanted", module, strings.Join(modules, ", "))
	}
	s.want(pickleClass)
	var n uint64
	switch op := s.u8(); {
	case s.err != nil:
	case op == shortBytes:
		n = uint64(s.u8())
	case op == longBytes:
		n = uint64(s.u32())
	default:
		s.fail("byte %#x where a bytes object begins", op)
	}
	serial := scanner{rest: s.take(n)}
	s.want(pickleEnd)
	s.end()
	if s.err != nil {
		return nil, fmt.Errorf("page list: %w", s.err)
	}

	l := &pageList{module: module}
	serial.want(serialStart)
	serial.want(listTag)
	if kind := serial.field(); serial.err == nil && string(kind) != listKind {
		serial.fail("a list of kind %.40q, %q is wanted", kind, listKind)
	}
	serial.want("t")
	t := serial.sized(4)
	serial.want("n")
	count := serial.sized(8)
	pages := serial.field()
	serial.end()
	if serial.err != nil {
		return nil, fmt.Errorf("page list: %w", serial.err)
	}
	l.memory = memory(binary.LittleEndian.Uint32(t))
	if l.memory > vram {
		return nil, fmt.Errorf("page list: memory type %d, 0 (DRAM) or 1 (VRAM) is wanted", l.memory)
	}
	c := binary.LittleEndian.Uint64(count)
	if c == 0 || c > kv.MaxSlots || c*pageBytes != uint64(len(pages)) {
		return nil, fmt.Errorf("page list: %d pages in %d bytes of %d each; 1 to %d are possible", c, len(pages), pageBytes, kv.MaxSlots)
	}
	l.pages = make([]page, c)
	for i := range l.pages {
		p := pages[i*pageBytes:]
		l.pages[i] = page{binary.LittleEndian.Uint64(p), binary.LittleEndian.Uint64(p[8:]), binary.LittleEndian.Uint64(p[16:])}
	}
	return l, nil
}

// checkLength says whether every page is a slot.
func (l *pageList) checkLength(slotBytes int64) error {
	for i, p := range l.pages {
		if p.length != uint64(slotBytes) {
			return fmt.Errorf("page %d has %d bytes, a slot has %d: chunk_size, model or dtype differ", i, p.length, slotBytes)
		}
	}
	return nil
}

// checkMapping says whether the pages are the slots of one mapping, in order.
func (l *pageList) checkMapping(slotBytes int64) error {
	if err := l.checkLength(slotBytes); err != nil {
		return err
	}
	first := l.pages[0]
	if first.addr == 0 || first.addr+uint64(len(l.pages))*uint64(slotBytes) < first.addr {
		return fmt.Errorf("%d pages of %d bytes from address %#x", len(l.pages), slotBytes, first.addr)
	}
	for i, p := range l.pages {
		if want := first.addr + uint64(i)*uint64(slotBytes); p.addr != want || p.device != first.device {
			return fmt.Errorf("page %d is at %#x on device %d, in one mapping it would be at %#x on %d", i, p.addr, p.device, want, first.device)
		}
	}
	return nil
}

// agentName reads the name of a NIXL agent out of its metadata, which begins
// with it.
func agentName(metadata []byte) (string, error) {
	s := scanner{rest: metadata}
	s.want(serialStart)
	s.want("Agent")
	name := s.field()
	switch {
	case s.err != nil:
		return "", fmt.Errorf("agent metadata: %w", s.err)
	case len(name) == 0 || len(name) > maxAgentName || bytes.IndexByte(name, 0) >= 0:
		return "", fmt.Errorf("agent metadata: a name of %d bytes, 1 to %d and no zero byte are possible", len(name), maxAgentName)
	}
	return string(name), nil
}

const maxAgentName = 1 << 10

// scanner reads a byte string; the first fault stays.
type scanner struct {
	rest []byte
	err  error
}

var errShort = errors.New("it ends too early")

func (s *scanner) fail(format string, args ...any) {
	if s.err == nil {
		s.err = fmt.Errorf(format, args...)
	}
}

func (s *scanner) take(n uint64) []byte {
	if s.err != nil {
		return nil
	}
	if n > uint64(len(s.rest)) {
		s.err = errShort
		return nil
	}
	b := s.rest[:n]
	s.rest = s.rest[n:]
	return b
}

func (s *scanner) want(text string) {
	if got := s.take(uint64(len(text))); s.err == nil && string(got) != text {
		s.fail("%q where %q is wanted", got, text)
	}
}

func (s *scanner) u8() byte {
	if b := s.take(1); s.err == nil {
		return b[0]
	}
	return 0
}

func (s *scanner) u32() uint32 {
	if b := s.take(4); s.err == nil {
		return binary.LittleEndian.Uint32(b)
	}
	return 0
}

func (s *scanner) u64() uint64 {
	if b := s.take(8); s.err == nil {
		return binary.LittleEndian.Uint64(b)
	}
	return 0
}

// field reads <len u64> <bytes> "|".
func (s *scanner) field() []byte {
	b := s.take(s.u64())
	s.want("|")
	return b
}

func (s *scanner) sized(n int) []byte {
	b := s.field()
	if s.err == nil && len(b) != n {
		s.fail("a field of %d bytes where %d are wanted", len(b), n)
	}
	return b
}

func (s *scanner) end() {
	if s.err == nil && len(s.rest) > 0 {
		s.fail("%d bytes after the end", len(s.rest))
	}
}
