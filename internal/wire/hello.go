package wire

import (
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
	"github.com/berthkv/berth/internal/msgpack"
)

// Layout is the map of the layout facts, which the local API's hello shares.
var Layout = msgpack.NewTable(
	msgpack.Int("slot_bytes", func(f *kv.Facts) *int64 { return &f.SlotBytes }),
	msgpack.Int("fmt", func(f *kv.Facts) *kv.Format { return &f.Format }),
	msgpack.Str("dtype", MaxName, func(f *kv.Facts) *kv.DType { return &f.DType }),
	msgpack.Int("chunk_tokens", func(f *kv.Facts) *int64 { return &f.ChunkTokens }),
	msgpack.Int("tp_size", func(f *kv.Facts) *int64 { return &f.TPSize }),
	msgpack.Int("tp_rank", func(f *kv.Facts) *int64 { return &f.TPRank }),
)

var hello = newKind("Hello",
	msgpack.Number("seq", func(m *msg.Hello) *uint64 { return &m.Seq }),
	msgpack.Uint("min", func(m *msg.Hello) *uint64 { return &m.Min }),
	msgpack.Uint("max", func(m *msg.Hello) *uint64 { return &m.Max }),
	msgpack.Str("role", MaxName, func(m *msg.Hello) *msg.Role { return &m.Role }),
	msgpack.Str("node", MaxNode, func(m *msg.Hello) *string { return &m.Node }),
	msgpack.Bin16("incarnation", func(m *msg.Hello) *kv.Incarnation { return &m.Incarnation }),
	msgpack.Bin16("secret", func(m *msg.Hello) *kv.Secret { return &m.Secret }),
	msgpack.Bool("resume", func(m *msg.Hello) *bool { return &m.Resume }),
	msgpack.Uint("session", func(m *msg.Hello) *uint64 { return &m.Session }).Optional(),
	msgpack.Map("layout", Layout, func(m *msg.Hello) **kv.Facts { return &m.Facts }),
)

var linkOffer = msgpack.NewTable(
	msgpack.Str("name", MaxName, func(o *msg.LinkOffer) *string { return &o.Name }),
	msgpack.Str("addr", MaxAddr, func(o *msg.LinkOffer) *string { return &o.Addr }),
)

var helloReply = newKind("HelloReply",
	msgpack.Number("re", func(m *msg.HelloReply) *uint64 { return &m.Re }),
	msgpack.Uint("version", func(m *msg.HelloReply) *uint64 { return &m.Version }),
	msgpack.Bin16("incarnation", func(m *msg.HelloReply) *kv.Incarnation { return &m.Incarnation }),
	msgpack.Bool("resumed", func(m *msg.HelloReply) *bool { return &m.Resumed }),
	msgpack.Int("capacity", func(m *msg.HelloReply) *int64 { return &m.Capacity }),
	msgpack.Int("lease_ms", func(m *msg.HelloReply) *int64 { return &m.LeaseMS }),
	msgpack.Maps("links", MaxLinks, linkOffer, func(m *msg.HelloReply) *[]msg.LinkOffer { return &m.Links }),
)

var heartbeat = newKind("Heartbeat",
	msgpack.Number("seq", func(m *msg.Heartbeat) *uint64 { return &m.Seq }),
)

var heartbeatReply = newKind("HeartbeatReply",
	msgpack.Number("re", func(m *msg.HeartbeatReply) *uint64 { return &m.Re }),
)
