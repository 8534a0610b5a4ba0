package wire

import (
	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/msg"
	"github.com/berthkv/berth/internal/msgpack"
)

var cancel = newKind("Cancel",
	msgpack.Number("seq", func(m *msg.Cancel) *uint64 { return &m.Seq }),
	msgpack.Uint("begin", func(m *msg.Cancel) *uint64 { return &m.Begin }).Optional(),
	msgpack.Str("req_id", MaxReqID, func(m *msg.Cancel) *string { return &m.ReqID }).Optional(),
	msgpack.Str("reason", MaxName, func(m *msg.Cancel) *fault.Code { return &m.Reason }),
	msgpack.Text("text", MaxText, func(m *msg.Cancel) *string { return &m.Text }).Optional(),
)

var ended = newEnded()

func newEnded() *kind[msg.Ended] {
	k := newKind("Ended",
		msgpack.Number("seq", func(m *msg.Ended) *uint64 { return &m.Seq }).Optional(),
		msgpack.Number("re", func(m *msg.Ended) *uint64 { return &m.Re }).Optional(),
		msgpack.Uint("begin", func(m *msg.Ended) *uint64 { return &m.Begin }).Optional(),
		msgpack.Str("req_id", MaxReqID, func(m *msg.Ended) *string { return &m.ReqID }).Optional(),
		msgpack.Str("ending", MaxName, func(m *msg.Ended) *msg.Ending { return &m.Ending }),
		msgpack.Str("reason", MaxName, func(m *msg.Ended) *fault.Code { return &m.Reason }).Optional(),
		msgpack.Text("text", MaxText, func(m *msg.Ended) *string { return &m.Text }).Optional(),
	)
	k.table.Check(func(m *msg.Ended) string {
		if (m.Seq == 0) == (m.Re == 0) {
			return "must have exactly one of seq and re"
		}
		return ""
	})
	return k
}

var drained = newKind("Drained",
	msgpack.Number("re", func(m *msg.Drained) *uint64 { return &m.Re }),
	msgpack.Uint("begin", func(m *msg.Drained) *uint64 { return &m.Begin }),
)

var errorReply = newKind("Error",
	msgpack.Number("re", func(m *msg.Error) *uint64 { return &m.Re }),
	msgpack.Str("code", MaxName, func(m *msg.Error) *fault.Code { return &m.Code }),
	msgpack.Text("text", MaxText, func(m *msg.Error) *string { return &m.Text }),
	msgpack.Int("retry_ms", func(m *msg.Error) *int64 { return &m.RetryMS }).Optional(),
)

var endingNotice = newKind("Ending",
	msgpack.Str("req_id", MaxReqID, func(m *msg.EndingNotice) *string { return &m.ReqID }),
	msgpack.Int("rank", func(m *msg.EndingNotice) *int64 { return &m.Rank }),
	msgpack.Str("ending", MaxName, func(m *msg.EndingNotice) *msg.Ending { return &m.Ending }),
	msgpack.Str("reason", MaxName, func(m *msg.EndingNotice) *fault.Code { return &m.Reason }).Optional(),
	msgpack.Text("text", MaxText, func(m *msg.EndingNotice) *string { return &m.Text }).Optional(),
)
