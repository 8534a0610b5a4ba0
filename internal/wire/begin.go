package wire

import (
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
	"github.com/berthkv/berth/internal/msgpack"
)

var begin = newKind("Begin",
	msgpack.Number("seq", func(m *msg.Begin) *uint64 { return &m.Seq }),
	msgpack.Uint("begin", func(m *msg.Begin) *uint64 { return &m.Begin }),
	msgpack.Str("req_id", MaxReqID, func(m *msg.Begin) *string { return &m.ReqID }),
	msgpack.Str("link", MaxName, func(m *msg.Begin) *string { return &m.Link }),
	msgpack.Int("total_chunks", func(m *msg.Begin) *int64 { return &m.TotalChunks }),
	msgpack.Int("deadline_ms", func(m *msg.Begin) *int64 { return &m.DeadlineMS }).Optional(),
	msgpack.Str("tokens_key", MaxKey, func(m *msg.Begin) *string { return &m.TokensKey }).Optional(),
)

var granted = newKind("Granted",
	msgpack.Number("re", func(m *msg.Granted) *uint64 { return &m.Re }),
	msgpack.Uint("begin", func(m *msg.Granted) *uint64 { return &m.Begin }),
	msgpack.Uint("generation", func(m *msg.Granted) *kv.Generation { return &m.Generation }),
	msgpack.PackedUint32s("slots", MaxSlots, func(m *msg.Granted) *[]kv.SlotID { return &m.Slots }),
)
