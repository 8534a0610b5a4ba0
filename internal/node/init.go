package node

import (
	"fmt"

	"github.com/berthkv/berth/internal/wire"
)

// RespondInit answers one message on the init port, whatever it is: an LMCache
// sender that gets no answer blocks its engine for ever. This build has no nixl
// link, so that a data handshake is refused with a text that says what to do.
func RespondInit(payload []byte) []byte {
	var answer wire.InitMessage
	m, err := wire.DecodeInit(payload, 0)
	switch m.(type) {
	case *wire.PySocketInitRequest:
		answer = &wire.PySocketInitResponse{Status: "ok"}
	case *wire.NixlInitRequest, *wire.NixlMemRegRequest:
		answer = &wire.BerthRefused{Text: "this Berth receiver has no nixl link: LMCache senders cannot move data to it"}
	default:
		if err == nil {
			err = fmt.Errorf("%T is no request", m)
		}
		answer = &wire.BerthRefused{Text: "not a handshake: " + err.Error()}
	}
	b, err := wire.AppendInit(nil, answer)
	if err != nil { // a text over its limit, which encoders cut: unreachable
		return nil
	}
	return b
}
