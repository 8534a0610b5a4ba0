package wire

import (
	"github.com/berthkv/berth/internal/msg"
	"github.com/berthkv/berth/internal/msgpack"
)

var watch = newKind("Watch",
	msgpack.Number("seq", func(m *msg.Watch) *uint64 { return &m.Seq }),
	msgpack.Str("req_id", MaxReqID, func(m *msg.Watch) *string { return &m.ReqID }),
	msgpack.Int("deadline_ms", func(m *msg.Watch) *int64 { return &m.DeadlineMS }).Optional(),
)

var ready = newKind("Ready",
	msgpack.Number("seq", func(m *msg.Ready) *uint64 { return &m.Seq }),
	msgpack.Str("req_id", MaxReqID, func(m *msg.Ready) *string { return &m.ReqID }),
)
