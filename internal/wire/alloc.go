package wire

import (
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
	"github.com/berthkv/berth/internal/msgpack"
)

// The LMCache dialect: every field is written, in LMCache's order.

var allocRequest = newKind("AllocRequest",
	msgpack.Strs("keys", MaxKeys, MaxKey, func(m *msg.AllocRequest) *[]string { return &m.Keys }),
	msgpack.Int("fmt", func(m *msg.AllocRequest) *kv.Format { return &m.Fmt }),
	msgpack.Ints("shape", MaxDims, func(m *msg.AllocRequest) *[]int64 { return &m.Shape }),
	msgpack.Str("dtype", MaxName, func(m *msg.AllocRequest) *kv.DType { return &m.DType }),
	msgpack.Int("last_chunk_toks", func(m *msg.AllocRequest) *int64 { return &m.LastChunkToks }),
	msgpack.Str("req_id", MaxReqID, func(m *msg.AllocRequest) *string { return &m.ReqID }).Default(),
	msgpack.Bool("is_last_batch", func(m *msg.AllocRequest) *bool { return &m.IsLastBatch }).Default(),
	msgpack.Int("total_chunks", func(m *msg.AllocRequest) *int64 { return &m.TotalChunks }).Default(),
)

var allocResponse = newKind("AllocResponse",
	msgpack.Ints("remote_indexes", MaxKeys, func(m *msg.AllocResponse) *[]int64 { return &m.RemoteIndexes }),
	msgpack.Ints("already_sent_indexes", MaxKeys, func(m *msg.AllocResponse) *[]int64 { return &m.AlreadySent }).Default(),
)

var proxyNotif = newKind("ProxyNotif",
	msgpack.Str("req_id", MaxReqID, func(m *msg.ProxyNotif) *string { return &m.ReqID }),
)

var cancelNotif = newKind("CancelNotif",
	msgpack.Str("req_id", MaxReqID, func(m *msg.CancelNotif) *string { return &m.ReqID }),
	msgpack.Strs("keys", MaxKeys, MaxKey, func(m *msg.CancelNotif) *[]string { return &m.Keys }),
)
