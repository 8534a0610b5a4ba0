package zmtp

import (
	"bytes"
	"encoding/binary"
	"slices"
)

const (
	greetingLen  = 64
	signatureLen = 10
	versionEnd   = 12
	maxIdentity  = 255
)

var mechanismNull = append([]byte("NULL"), make([]byte, 16)...)

// appendGreeting encodes what libzmq sends first: a signature whose length field ZMTP 1.0 peers would read (identity and its
// flags), version 3.1, and the NULL mechanism.
func appendGreeting(b []byte, identityLen int) []byte {
	b = append(b, 0xff)
	b = binary.BigEndian.AppendUint64(b, uint64(identityLen)+1)
	b = append(b, 0x7f, 3, 1)
	b = append(b, mechanismNull...)
	return append(b, make([]byte, greetingLen-versionEnd-len(mechanismNull))...)
}

// parseGreeting checks as much of a greeting as b holds, so that garbage is told from its first bytes, and returns the minor
// version once b holds it. A peer of a later major version speaks the lower one with us.
func parseGreeting(b []byte) (minor byte, err error) {
	if len(b) >= 1 && b[0] != 0xff {
		return 0, protocolErrorf("not a ZMTP greeting: first byte %#02x", b[0])
	}
	if len(b) >= signatureLen && b[9]&1 == 0 {
		return 0, protocolErrorf("the peer speaks ZMTP 1.0, not 3.x")
	}
	if len(b) >= signatureLen+1 && b[10] < 3 {
		return 0, protocolErrorf("the peer speaks ZMTP revision %d, not 3.x", b[10])
	}
	if len(b) >= versionEnd {
		if minor = b[11]; b[10] > 3 {
			minor = 1
		}
	}
	if len(b) < greetingLen {
		return minor, nil
	}
	if got := b[versionEnd : versionEnd+len(mechanismNull)]; !bytes.Equal(got, mechanismNull) {
		return 0, protocolErrorf("the peer's mechanism is %q, ours is NULL", bytes.TrimRight(got, "\x00"))
	}
	return minor, nil
}

// socketType is the value of a READY command's Socket-Type.
type socketType string

const (
	typeRouter socketType = "ROUTER"
	typeDealer socketType = "DEALER"
	typeRep    socketType = "REP"
	typeReq    socketType = "REQ"
	typePush   socketType = "PUSH"
	typePull   socketType = "PULL"
)

// peersOf lists which types may talk to which (ZMTP 3.1, "the Socket-Type property").
var peersOf = map[socketType][]socketType{
	typeRouter: {typeDealer, typeReq, typeRouter},
	typeDealer: {typeRouter, typeRep, typeDealer},
	typeRep:    {typeReq, typeDealer},
	typeReq:    {typeRouter, typeRep},
	typePush:   {typePull},
	typePull:   {typePush},
}

func (t socketType) fits(peer socketType) bool { return slices.Contains(peersOf[t], peer) }

// announcesIdentity: libzmq sends the Identity property, empty or not, from these types only.
func (t socketType) announcesIdentity() bool {
	return t == typeReq || t == typeDealer || t == typeRouter
}

// receives: a PUSH socket gets no messages.
func (t socketType) receives() bool { return t != typePush }

func appendReady(b []byte, t socketType, identity []byte) []byte {
	props := appendProperty(nil, "Socket-Type", []byte(t))
	if t.announcesIdentity() {
		props = appendProperty(props, "Identity", identity)
	}
	return appendCommand(b, "READY", props)
}

func appendProperty(b []byte, name string, value []byte) []byte {
	b = append(append(b, byte(len(name))), name...)
	return append(binary.BigEndian.AppendUint32(b, uint32(len(value))), value...)
}

// parseReady reads the properties of a READY command. Unknown ones are ignored; names are compared without case.
func parseReady(data []byte) (t socketType, identity []byte, err error) {
	for len(data) > 0 {
		n := 1 + int(data[0])
		if n == 1 || len(data) < n+4 {
			return "", nil, protocolErrorf("malformed property in READY")
		}
		name, rest := data[1:n], data[n+4:]
		size := binary.BigEndian.Uint32(data[n:])
		if uint64(len(rest)) < uint64(size) {
			return "", nil, protocolErrorf("property %q in READY is cut off", name)
		}
		value := rest[:size]
		data = rest[size:]
		switch {
		case bytes.EqualFold(name, []byte("Socket-Type")):
			t = socketType(value)
		case bytes.EqualFold(name, []byte("Identity")):
			if err := checkIdentity(value); err != nil {
				return "", nil, err
			}
			identity = bytes.Clone(value)
		}
	}
	return t, identity, nil
}
