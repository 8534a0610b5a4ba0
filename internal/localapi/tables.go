package localapi

import (
	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
	"github.com/berthkv/berth/internal/msgpack"
	"github.com/berthkv/berth/internal/wire"
)

const (
	maxName = wire.MaxName
	maxHost = 256 // bytes of a host
)

// ---- requests ----

var opHello = newOp("hello",
	msgpack.Uint("version", func(m *Hello) *uint64 { return &m.Version }),
	msgpack.Str("part", maxName, func(m *Hello) *Part { return &m.Part }),
	msgpack.Str("engine_id", kv.MaxEngineID, func(m *Hello) *string { return &m.EngineID }).Optional(),
	msgpack.Int("rank", func(m *Hello) *int64 { return &m.Rank }).Optional(),
	msgpack.Map("layout", wire.Layout, func(m *Hello) **kv.Facts { return &m.Layout }),
	msgpack.Ints("shape", wire.MaxDims, func(m *Hello) *[]int64 { return &m.Shape }).Optional(),
	msgpack.Str("tokens_key", wire.MaxKey, func(m *Hello) *string { return &m.TokensKey }).Optional(),
)

var opBegin = newOp("begin",
	msgpack.Str("req", wire.MaxReqID, func(m *Begin) *string { return &m.Req }),
	msgpack.Int("total_chunks", func(m *Begin) *int64 { return &m.TotalChunks }),
	msgpack.Str("host", maxHost, func(m *Begin) *string { return &m.Host }),
	msgpack.Int("alloc_port", func(m *Begin) *int64 { return &m.AllocPort }),
	msgpack.Int("init_port", func(m *Begin) *int64 { return &m.InitPort }).Optional(),
	msgpack.Int("deadline_ms", func(m *Begin) *int64 { return &m.DeadlineMS }).Optional(),
	msgpack.Int("stage", func(m *Begin) *int64 { return &m.Stage }).Optional(),
	msgpack.Bool("berth_proxy", func(m *Begin) *bool { return &m.BerthProxy }).Optional(),
)

var opStage = newOp("stage",
	msgpack.Str("req", wire.MaxReqID, func(m *Stage) *string { return &m.Req }),
	msgpack.Int("n", func(m *Stage) *int64 { return &m.N }),
	msgpack.Int("deadline_ms", func(m *Stage) *int64 { return &m.DeadlineMS }).Optional(),
	msgpack.Bool("nonblocking", func(m *Stage) *bool { return &m.NonBlocking }).Optional(),
)

var opUnstage = newOp("unstage",
	msgpack.Str("req", wire.MaxReqID, func(m *Unstage) *string { return &m.Req }),
	msgpack.Uint32s("slots", wire.MaxSlots, func(m *Unstage) *[]kv.SlotID { return &m.Slots }),
)

var staged = msgpack.NewTable(
	msgpack.Int("index", func(c *Staged) *int64 { return &c.Index }),
	msgpack.Str("key", wire.MaxKey, func(c *Staged) *string { return &c.Key }),
	msgpack.Uint32("slot", func(c *Staged) *kv.SlotID { return &c.Slot }),
	msgpack.Int("tokens", func(c *Staged) *int64 { return &c.Tokens }),
)

var opSubmit = newOp("submit",
	msgpack.Str("req", wire.MaxReqID, func(m *Submit) *string { return &m.Req }),
	msgpack.Maps("chunks", wire.MaxKeys, staged, func(m *Submit) *[]Staged { return &m.Chunks }),
	msgpack.Int("end", func(m *Submit) *int64 { return &m.End }).
		Present(func(m *Submit) *bool { return &m.HasEnd }),
)

var opCancel = newOp("cancel",
	msgpack.Str("req", wire.MaxReqID, func(m *Cancel) *string { return &m.Req }),
	msgpack.Str("reason", maxName, func(m *Cancel) *fault.Code { return &m.Reason }).Optional(),
	msgpack.Text("text", wire.MaxText, func(m *Cancel) *string { return &m.Text }).Optional(),
)

var opWait = newOp("wait",
	msgpack.Str("req", wire.MaxReqID, func(m *Wait) *string { return &m.Req }),
	msgpack.Int("deadline_ms", func(m *Wait) *int64 { return &m.DeadlineMS }),
)

var opFind = newOp("find",
	msgpack.Str("by", kv.MaxBy, func(m *Find) *string { return &m.By }),
	msgpack.Strs("keys", wire.MaxKeys, wire.MaxKey, func(m *Find) *[]string { return &m.Keys }),
)

var opClaim = newOp("claim",
	msgpack.Str("by", kv.MaxBy, func(m *Claim) *string { return &m.By }),
	msgpack.Str("req", wire.MaxReqID, func(m *Claim) *string { return &m.Req }),
)

var opRelease = newOp("release",
	msgpack.Str("by", kv.MaxBy, func(m *Release) *string { return &m.By }),
	msgpack.Str("req", wire.MaxReqID, func(m *Release) *string { return &m.Req }),
	msgpack.Ints("chunks", wire.MaxSlots, func(m *Release) *[]int64 { return &m.Chunks }).Optional(),
)

var (
	opStatus = newOp[Status]("status")
	opDrain  = newOp[Drain]("drain")
)

var opHangup = newOp("hangup",
	msgpack.Uint("call", func(m *Hangup) *uint64 { return &m.Call }),
)

// ---- answers ----

var answerHello = msgpack.NewTable(
	msgpack.Uint("version", func(m *HelloAnswer) *uint64 { return &m.Version }),
	msgpack.Bin16("incarnation", func(m *HelloAnswer) *kv.Incarnation { return &m.Incarnation }),
	msgpack.Int("slot_bytes", func(m *HelloAnswer) *int64 { return &m.SlotBytes }),
	msgpack.Int("staging_capacity", func(m *HelloAnswer) *int64 { return &m.StagingCapacity }),
	msgpack.Int("receive_capacity", func(m *HelloAnswer) *int64 { return &m.ReceiveCapacity }),
	msgpack.Int("max_stage", func(m *HelloAnswer) *int64 { return &m.MaxStage }),
	msgpack.Strs("pools", MaxPools, maxName, func(m *HelloAnswer) *[]string { return &m.Pools }),
)

var answerDone = msgpack.NewTable[Done]()

var answerSlots = msgpack.NewTable(
	msgpack.Uint32s("slots", wire.MaxSlots, func(m *Slots) *[]kv.SlotID { return &m.Slots }),
)

var answerEnding = msgpack.NewTable(
	msgpack.Str("ending", maxName, func(m *Ending) *msg.Ending { return &m.Ending }),
	msgpack.Str("reason", maxName, func(m *Ending) *fault.Code { return &m.Reason }).Optional(),
	msgpack.Text("text", wire.MaxText, func(m *Ending) *string { return &m.Text }).Optional(),
)

var answerFound = msgpack.NewTable(
	msgpack.Str("req", wire.MaxReqID, func(m *Found) *string { return &m.Req }).Optional(),
	msgpack.Int("matched", func(m *Found) *int64 { return &m.Matched }),
)

var claimed = msgpack.NewTable(
	msgpack.Int("index", func(c *Chunk) *int64 { return &c.Index }),
	msgpack.Uint32("slot", func(c *Chunk) *kv.SlotID { return &c.Slot }),
	msgpack.Int("tokens", func(c *Chunk) *int64 { return &c.Tokens }),
	msgpack.Int("bytes", func(c *Chunk) *int64 { return &c.Bytes }),
	msgpack.Str("key", wire.MaxKey, func(c *Chunk) *string { return &c.Key }),
)

var answerClaimed = msgpack.NewTable(
	msgpack.Maps("chunks", wire.MaxSlots, claimed, func(m *Claimed) *[]Chunk { return &m.Chunks }),
	msgpack.Int("fmt", func(m *Claimed) *kv.Format { return &m.Fmt }),
	msgpack.Str("dtype", maxName, func(m *Claimed) *kv.DType { return &m.DType }),
	msgpack.Ints("shape", wire.MaxDims, func(m *Claimed) *[]int64 { return &m.Shape }),
)

var answerStatus = msgpack.NewTable(
	msgpack.Str("status", MaxFrame, func(m *StatusAnswer) *string { return &m.Status }),
)

type errorMap struct {
	Code    fault.Code
	Text    string
	RetryMS int64
}

var errorTable = msgpack.NewTable(
	msgpack.Str("code", maxName, func(m *errorMap) *fault.Code { return &m.Code }),
	msgpack.Text("text", wire.MaxText, func(m *errorMap) *string { return &m.Text }),
	msgpack.Int("retry_ms", func(m *errorMap) *int64 { return &m.RetryMS }).Optional(),
)

// ---- events ----

var eventGranted = msgpack.NewTable(
	msgpack.Str("req", wire.MaxReqID, func(m *Granted) *string { return &m.Req }),
	msgpack.Uint32s("slots", wire.MaxSlots, func(m *Granted) *[]kv.SlotID { return &m.Slots }),
)

var eventEnded = msgpack.NewTable(
	msgpack.Str("req", wire.MaxReqID, func(m *Ended) *string { return &m.Req }),
	msgpack.Str("ending", maxName, func(m *Ended) *msg.Ending { return &m.Ending }),
	msgpack.Str("reason", maxName, func(m *Ended) *fault.Code { return &m.Reason }).Optional(),
	msgpack.Text("text", wire.MaxText, func(m *Ended) *string { return &m.Text }).Optional(),
)
