package node

import (
	"fmt"

	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/wire"
)

// DataHandshake answers an LMCache sender's two messages: the receiving half of
// the nixl link.
type DataHandshake interface {
	Init(metadata []byte) (agent, ours []byte, err error)
	Register(pages []byte) (ours []byte, err error)
}

// RespondInit answers one message on the init port, whatever it is: an LMCache
// sender that gets no answer blocks its engine for ever. Without a handshake
// (h nil) the refusal says what to do. The core knows of a handshake before the
// sender has its answer.
func (n *Node) RespondInit(h DataHandshake, payload []byte) []byte {
	var answer wire.InitMessage
	// The sender's pool may have more slots than ours.
	m, err := wire.DecodeInit(payload, kv.MaxSlots)
	switch m := m.(type) {
	case *wire.PySocketInitRequest:
		answer = &wire.PySocketInitResponse{Status: "ok"}
	case *wire.NixlInitRequest:
		if h == nil {
			err = errNoNixl
			break
		}
		var r wire.NixlInitResponse
		r.RemoteAgent, r.RemoteMeta, err = h.Init(m.LocalMeta)
		answer = &r
	case *wire.NixlMemRegRequest:
		if h == nil {
			err = errNoNixl
			break
		}
		var r wire.NixlMemRegResponse
		if r.RemotePages, err = h.Register(m.LocalPages); err == nil {
			n.Handshaken(m.LocalID)
		}
		answer = &r
	default:
		if err == nil {
			err = fmt.Errorf("%T is no request", m)
		}
		err = fmt.Errorf("not a handshake: %w", err)
	}
	if err != nil {
		n.log.Warn("handshake refused", "err", err)
		answer = &wire.BerthRefused{Text: err.Error()}
	}
	b, err := wire.AppendInit(nil, answer)
	if err != nil { // metadata or a page list over its limit
		b, _ = wire.AppendInit(nil, &wire.BerthRefused{Text: err.Error()})
	}
	return b
}

var errNoNixl = fmt.Errorf("this Berth receiver has no nixl link (links has no nixl): LMCache senders cannot move data to it")
