package wire

import (
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
	"github.com/berthkv/berth/internal/msgpack"
)

var source = msgpack.NewTable(
	msgpack.Uint32("slot", func(s *msg.Source) *kv.SlotID { return &s.Slot }),
	msgpack.Uint("generation", func(s *msg.Source) *kv.Generation { return &s.Generation }),
)

var chunk = msgpack.NewTable(
	msgpack.Int("index", func(c *msg.Chunk) *int64 { return &c.Index }),
	msgpack.Str("key", MaxKey, func(c *msg.Chunk) *string { return &c.Key }),
	msgpack.Int("tokens", func(c *msg.Chunk) *int64 { return &c.Tokens }),
	msgpack.Uint32("checksum", func(c *msg.Chunk) *uint32 { return &c.Checksum }).
		Present(func(c *msg.Chunk) *bool { return &c.HasChecksum }),
	msgpack.Map("src", source, func(c *msg.Chunk) **msg.Source { return &c.Src }),
)

var commit = newKind("Commit",
	msgpack.Number("seq", func(m *msg.Commit) *uint64 { return &m.Seq }),
	msgpack.Uint("begin", func(m *msg.Commit) *uint64 { return &m.Begin }),
	msgpack.Maps("chunks", MaxKeys, chunk, func(m *msg.Commit) *[]msg.Chunk { return &m.Chunks }),
	msgpack.Int("fmt", func(m *msg.Commit) *kv.Format { return &m.Fmt }).Optional(),
	msgpack.Str("dtype", MaxName, func(m *msg.Commit) *kv.DType { return &m.DType }).Optional(),
	msgpack.Ints("shape", MaxDims, func(m *msg.Commit) *[]int64 { return &m.Shape }).Optional(),
	msgpack.Int("end", func(m *msg.Commit) *int64 { return &m.End }).
		Present(func(m *msg.Commit) *bool { return &m.HasEnd }),
)

var commitReply = newKind("CommitReply",
	msgpack.Number("re", func(m *msg.CommitReply) *uint64 { return &m.Re }),
	msgpack.Uint("begin", func(m *msg.CommitReply) *uint64 { return &m.Begin }),
	msgpack.Bool("complete", func(m *msg.CommitReply) *bool { return &m.Complete }),
)
