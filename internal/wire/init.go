package wire

import (
	"fmt"

	"github.com/berthkv/berth/internal/msgpack"
)

// InitMessage is a message of the init port, which only LMCache peers use.
type InitMessage interface{ initMessage() }

// NixlInitRequest carries a sender's NIXL agent metadata.
type NixlInitRequest struct{ LocalMeta []byte }

// NixlInitResponse answers it with the receiver's.
type NixlInitResponse struct {
	RemoteAgent []byte
	RemoteMeta  []byte
}

// NixlMemRegRequest carries the page list of a sender's pool.
type NixlMemRegRequest struct {
	RemoteAgent []byte
	LocalID     string // its identities on the alloc port begin with this and -to-
	LocalPages  []byte
}

// NixlMemRegResponse answers it with the receiver's.
type NixlMemRegResponse struct{ RemotePages []byte }

// PySocketInitRequest is the handshake of LMCache's mock_memory channel.
type PySocketInitRequest struct {
	HasURL      bool // a sender sends nil
	PeerInitURL string
}

// PySocketInitResponse answers it; Status is "ok".
type PySocketInitResponse struct{ Status string }

// BerthRefused answers whatever the init port cannot serve.
type BerthRefused struct{ Text string }

func (*NixlInitRequest) initMessage()      {}
func (*NixlInitResponse) initMessage()     {}
func (*NixlMemRegRequest) initMessage()    {}
func (*NixlMemRegResponse) initMessage()   {}
func (*PySocketInitRequest) initMessage()  {}
func (*PySocketInitResponse) initMessage() {}
func (*BerthRefused) initMessage()         {}

// initKinds has the decoder of each init message by its name.
var initKinds = map[string]func([]byte) (InitMessage, error){}

func newInitKind[T any, P interface {
	*T
	InitMessage
}](name string, fields ...msgpack.Field[T]) *kind[T] {
	k := makeKind(name, fields)
	initKinds[name] = func(b []byte) (InitMessage, error) {
		m, err := k.decode(b)
		return P(m), err
	}
	return k
}

var nixlInitRequest = newInitKind("NixlInitRequest",
	msgpack.Bin("local_meta_bytes", MaxMeta, func(m *NixlInitRequest) *[]byte { return &m.LocalMeta }),
)

var nixlInitResponse = newInitKind("NixlInitResponse",
	msgpack.Bin("remote_agent_name", MaxAgent, func(m *NixlInitResponse) *[]byte { return &m.RemoteAgent }),
	msgpack.Bin("remote_meta_bytes", MaxMeta, func(m *NixlInitResponse) *[]byte { return &m.RemoteMeta }),
)

var nixlMemRegRequest = newInitKind("NixlMemRegRequest",
	msgpack.Bin("remote_agent_name", MaxAgent, func(m *NixlMemRegRequest) *[]byte { return &m.RemoteAgent }),
	msgpack.Str("local_id", MaxURL, func(m *NixlMemRegRequest) *string { return &m.LocalID }),
	msgpack.Bin("local_xfer_dlist_bytes", MaxPageList, func(m *NixlMemRegRequest) *[]byte { return &m.LocalPages }),
)

var nixlMemRegResponse = newInitKind("NixlMemRegResponse",
	msgpack.Bin("remote_xfer_dlist_bytes", MaxPageList, func(m *NixlMemRegResponse) *[]byte { return &m.RemotePages }),
)

var pySocketInitRequest = newInitKind("PySocketInitRequest",
	msgpack.NilStr("peer_init_url", MaxURL, func(m *PySocketInitRequest) (*bool, *string) { return &m.HasURL, &m.PeerInitURL }),
)

var pySocketInitResponse = newInitKind("PySocketInitResponse",
	msgpack.Str("status", MaxName, func(m *PySocketInitResponse) *string { return &m.Status }),
)

var berthRefused = newInitKind("BerthRefused",
	msgpack.Text("text", MaxText, func(m *BerthRefused) *string { return &m.Text }),
)

// maxInit returns the most bytes of a message on the init port of a pool of
// that many slots: a page list, and what goes with it.
func maxInit(slots int64) int { return max(pageListLimit(slots), MaxMeta) + 64<<10 }

// DecodeInit reads one message of the init port of a pool of that many slots;
// a page list for more slots is refused. The error is an *Error.
func DecodeInit(b []byte, slots int64) (InitMessage, error) {
	if limit := maxInit(slots); len(b) > limit {
		return nil, &Error{Kind: Malformed, Text: fmt.Sprintf("message of %d bytes, at most %d", len(b), limit)}
	}
	name, err := peekType(b)
	if err != nil {
		return nil, &Error{Kind: Malformed, Text: err.Error()}
	}
	k, ok := initKinds[string(name)]
	if !ok {
		return nil, &Error{Kind: UnknownType, Type: string(name), Text: fmt.Sprintf("unknown message %q", name)}
	}
	m, err := k(b)
	if err != nil {
		return nil, &Error{Kind: Malformed, Type: string(name), Text: err.Error()}
	}
	var pages []byte
	switch m := m.(type) {
	case *NixlMemRegRequest:
		pages = m.LocalPages
	case *NixlMemRegResponse:
		pages = m.RemotePages
	}
	if limit := pageListLimit(slots); len(pages) > limit {
		return nil, &Error{Kind: Malformed, Type: string(name),
			Text: fmt.Sprintf("page list of %d bytes, at most %d for %d slots", len(pages), limit, slots)}
	}
	return m, nil
}

// AppendInit writes m after b.
func AppendInit(b []byte, m InitMessage) ([]byte, error) {
	switch m := m.(type) {
	case *NixlInitRequest:
		return nixlInitRequest.append(b, m)
	case *NixlInitResponse:
		return nixlInitResponse.append(b, m)
	case *NixlMemRegRequest:
		return nixlMemRegRequest.append(b, m)
	case *NixlMemRegResponse:
		return nixlMemRegResponse.append(b, m)
	case *PySocketInitRequest:
		return pySocketInitRequest.append(b, m)
	case *PySocketInitResponse:
		return pySocketInitResponse.append(b, m)
	case *BerthRefused:
		return berthRefused.append(b, m)
	}
	return nil, fmt.Errorf("%T is no message of the init port", m)
}
