package zmtp

import "encoding/binary"

// Flags of a frame header (ZMTP 3.1, "framing"). The other bits are reserved and must be zero.
const (
	flagMore    = 1
	flagLong    = 2
	flagCommand = 4
	flagsKnown  = flagMore | flagLong | flagCommand
)

// maxHeader is the length of a long frame's header: flags and eight bytes of length.
const maxHeader = 9

// header is a decoded frame header.
type header struct {
	flags byte
	size  uint64 // of the body
	len   int    // of the header itself
}

// parseHeader decodes the header at the start of b; ok is false when b is too short to hold it.
func parseHeader(b []byte) (h header, ok bool, err error) {
	if len(b) == 0 {
		return h, false, nil
	}
	h.flags = b[0]
	if h.flags&^flagsKnown != 0 {
		return h, false, protocolErrorf("reserved frame flags %#02x", h.flags)
	}
	if h.flags&(flagCommand|flagMore) == flagCommand|flagMore {
		return h, false, protocolErrorf("command with more frames to come")
	}
	if h.flags&flagLong == 0 {
		if len(b) < 2 {
			return h, false, nil
		}
		h.size, h.len = uint64(b[1]), 2
		return h, true, nil
	}
	if len(b) < maxHeader {
		return h, false, nil
	}
	h.size, h.len = binary.BigEndian.Uint64(b[1:]), maxHeader
	if h.size>>63 != 0 {
		return h, false, protocolErrorf("frame length %#x", h.size)
	}
	return h, true, nil
}

func appendHeader(b []byte, flags byte, size int) []byte {
	if size <= 255 {
		return append(b, flags, byte(size))
	}
	return binary.BigEndian.AppendUint64(append(b, flags|flagLong), uint64(size))
}

// appendMessage encodes a message of one or more frames.
func appendMessage(b []byte, frames [][]byte) []byte {
	for i, f := range frames {
		var flags byte
		if i < len(frames)-1 {
			flags = flagMore
		}
		b = append(appendHeader(b, flags, len(f)), f...)
	}
	return b
}

// encodedSize is the number of bytes that appendMessage adds.
func encodedSize(frames [][]byte) int {
	n := 0
	for _, f := range frames {
		n += 2 + len(f)
		if len(f) > 255 {
			n += maxHeader - 2
		}
	}
	return n
}

// appendCommand encodes a command whose data are the given parts.
func appendCommand(b []byte, name string, parts ...[]byte) []byte {
	size := 1 + len(name)
	for _, p := range parts {
		size += len(p)
	}
	b = appendHeader(b, flagCommand, size)
	b = append(append(b, byte(len(name))), name...)
	for _, p := range parts {
		b = append(b, p...)
	}
	return b
}

// parseCommand splits the body of a command frame into name and data, both aliases of body.
func parseCommand(body []byte) (name string, data []byte, err error) {
	if len(body) == 0 || body[0] == 0 || len(body) < 1+int(body[0]) {
		return "", nil, protocolErrorf("malformed command of %d bytes", len(body))
	}
	n := 1 + int(body[0])
	return string(body[1:n]), body[n:], nil
}

// maxPingContext is the longest context of a PING (ZMTP 3.1).
const maxPingContext = 16

// appendPing encodes a PING; ttl is in tenths of a second, 0 promises nothing.
func appendPing(b []byte, ttl uint16, context []byte) []byte {
	return appendCommand(b, "PING", binary.BigEndian.AppendUint16(nil, ttl), context)
}

// parsePing returns TTL and context (an alias of data).
func parsePing(data []byte) (ttl uint16, context []byte, err error) {
	if len(data) < 2 || len(data) > 2+maxPingContext {
		return 0, nil, protocolErrorf("PING with %d bytes", len(data))
	}
	return binary.BigEndian.Uint16(data), data[2:], nil
}
