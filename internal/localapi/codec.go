package localapi

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msgpack"
)

// op is one operation: its name and the fields of its request.
type op[T any] struct {
	name  string
	table *msgpack.Table[T]
}

// ops has the decoder of each request by its operation's name.
var ops = map[string]func(*msgpack.Reader) Request{}

func newOp[T any, P interface {
	*T
	Request
}](name string, fields ...msgpack.Field[T]) *op[T] {
	o := &op[T]{name, msgpack.NewTable(fields...)}
	ops[name] = func(r *msgpack.Reader) Request {
		m := new(T)
		o.table.Get(r, m, "op", name)
		return P(m)
	}
	return o
}

func (o *op[T]) put(w *msgpack.Writer, id uint64, m *T) {
	w.Map(2 + o.table.Len(m))
	w.Key("id")
	w.Uint(id, math.MaxUint64)
	w.Key("op")
	w.Key(o.name)
	o.table.Put(w, m)
}

// AppendRequest writes the map of a request after b. It errs when a field is
// over its limit or is not UTF-8, with a fault.BadRequest.
func AppendRequest(b []byte, id uint64, req Request) ([]byte, error) {
	w := msgpack.NewWriter(b)
	switch m := req.(type) {
	case *Hello:
		opHello.put(w, id, m)
	case *Begin:
		opBegin.put(w, id, m)
	case *Stage:
		opStage.put(w, id, m)
	case *Unstage:
		opUnstage.put(w, id, m)
	case *Submit:
		opSubmit.put(w, id, m)
	case *Cancel:
		opCancel.put(w, id, m)
	case *Wait:
		opWait.put(w, id, m)
	case *Find:
		opFind.put(w, id, m)
	case *Claim:
		opClaim.put(w, id, m)
	case *Release:
		opRelease.put(w, id, m)
	case *Status:
		opStatus.put(w, id, m)
	case *Drain:
		opDrain.put(w, id, m)
	case *Hangup:
		opHangup.put(w, id, m)
	default:
		return nil, fmt.Errorf("%T is no request", req)
	}
	b, err := w.Bytes()
	if err != nil {
		return nil, fault.New(fault.BadRequest, "%T: %s", req, err)
	}
	return b, nil
}

// DecodeRequest reads the map of a request. When it errs, the error is a
// *fault.Error to answer the request with if hasID, and the connection is
// beyond help if not.
func DecodeRequest(b []byte) (id uint64, hasID bool, req Request, err error) {
	name, hasOp := "", false
	r := msgpack.NewReader(b)
	for range r.Map() {
		switch string(r.Key()) {
		case "id":
			if v := r.Uint(math.MaxUint64); r.Err() == nil {
				id, hasID = v, true
			}
		case "op":
			if v := r.Str(maxName); r.Err() == nil && !hasOp {
				name, hasOp = v, true
			}
		default:
			r.Skip()
		}
	}
	r.End()
	switch get := ops[name]; {
	case r.Err() != nil:
		err = r.Err()
	case !hasOp:
		err = fault.New(fault.BadRequest, "missing op")
	case get == nil:
		err = fault.New(fault.UnknownMessage, "unknown op %q", name)
	default:
		r = msgpack.NewReader(b)
		req = get(r)
		err = r.Err()
	}
	if err == nil {
		return id, hasID, req, nil
	}
	var typed *fault.Error
	if !errors.As(err, &typed) {
		if name != "" {
			name += ": "
		}
		err = fault.New(fault.BadRequest, "%s%s", name, err)
	}
	return id, hasID, nil, err
}

// AppendAnswer writes the map of an answer after b.
func AppendAnswer(b []byte, id uint64, ans Answer) ([]byte, error) {
	w := msgpack.NewWriter(b)
	switch m := ans.(type) {
	case *HelloAnswer:
		putAnswer(w, id, answerHello, m)
	case *Done:
		putAnswer(w, id, answerDone, m)
	case *Slots:
		putAnswer(w, id, answerSlots, m)
	case *Ending:
		putAnswer(w, id, answerEnding, m)
	case *Found:
		putAnswer(w, id, answerFound, m)
	case *Claimed:
		putAnswer(w, id, answerClaimed, m)
	case *StatusAnswer:
		putAnswer(w, id, answerStatus, m)
	default:
		return nil, fmt.Errorf("%T is no answer", ans)
	}
	return w.Bytes()
}

func putAnswer[T any](w *msgpack.Writer, id uint64, t *msgpack.Table[T], m *T) {
	w.Map(1 + t.Len(m))
	w.Key("id")
	w.Uint(id, math.MaxUint64)
	t.Put(w, m)
}

// AppendError writes the map of an answer that is an error after b.
func AppendError(b []byte, id uint64, e *fault.Error) ([]byte, error) {
	w := msgpack.NewWriter(b)
	w.Map(2)
	w.Key("id")
	w.Uint(id, math.MaxUint64)
	w.Key("error")
	errorTable.PutMap(w, &errorMap{Code: e.Code, Text: e.Text, RetryMS: e.Retry.Millis()})
	return w.Bytes()
}

// AppendEvent writes the map of an event after b.
func AppendEvent(b []byte, ev Event) ([]byte, error) {
	w := msgpack.NewWriter(b)
	switch m := ev.(type) {
	case *Granted:
		putEvent(w, "granted", eventGranted, m)
	case *Ended:
		putEvent(w, "ended", eventEnded, m)
	default:
		return nil, fmt.Errorf("%T is no event", ev)
	}
	return w.Bytes()
}

func putEvent[T any](w *msgpack.Writer, name string, t *msgpack.Table[T], m *T) {
	w.Map(1 + t.Len(m))
	w.Key("event")
	w.Key(name)
	t.Put(w, m)
}

// Reply is a frame from an agent: an event, or the answer to the call ID,
// which is Err or what DecodeAnswer makes of the frame.
type Reply struct {
	Event Event // nil: an answer. Unknown events have a nil Event and no ID
	HasID bool
	ID    uint64
	Err   *fault.Error
}

// DecodeReply reads the map of an agent's frame as far as it can be read
// without the request that it answers.
func DecodeReply(b []byte) (Reply, error) {
	var reply Reply
	event := ""
	r := msgpack.NewReader(b)
	for range r.Map() {
		switch string(r.Key()) {
		case "id":
			reply.ID, reply.HasID = r.Uint(math.MaxUint64), true
		case "event":
			event = r.Str(maxName)
		case "error":
			var e errorMap
			errorTable.Get(r, &e, "", "")
			reply.Err = &fault.Error{Code: e.Code, Text: e.Text}
			if e.RetryMS > 0 {
				reply.Err.Retry = kv.FromMillis(e.RetryMS)
			}
		default:
			r.Skip()
		}
	}
	r.End()
	if err := r.Err(); err != nil {
		return Reply{}, err
	}
	if !reply.HasID && event == "" {
		return Reply{}, fmt.Errorf("neither id nor event")
	}
	if reply.HasID {
		return reply, nil
	}
	r = msgpack.NewReader(b)
	switch event {
	case "granted":
		m := new(Granted)
		eventGranted.Get(r, m, "event", event)
		reply.Event = m
	case "ended":
		m := new(Ended)
		eventEnded.Get(r, m, "event", event)
		reply.Event = m
	}
	return reply, r.Err()
}

// DecodeAnswer reads the map of an answer to req that is no error.
func DecodeAnswer(b []byte, req Request) (Answer, error) {
	switch req.(type) {
	case *Hello:
		return getAnswer(b, answerHello)
	case *Stage:
		return getAnswer(b, answerSlots)
	case *Cancel, *Wait:
		return getAnswer(b, answerEnding)
	case *Find:
		return getAnswer(b, answerFound)
	case *Claim:
		return getAnswer(b, answerClaimed)
	case *Status:
		return getAnswer(b, answerStatus)
	}
	return getAnswer(b, answerDone)
}

func getAnswer[T any, P interface {
	*T
	Answer
}](b []byte, t *msgpack.Table[T]) (P, error) {
	r := msgpack.NewReader(b)
	m := new(T)
	t.Get(r, m, "", "")
	return P(m), r.Err()
}

// appendFrame writes a frame after b: the length of what body appends, and that.
func appendFrame(b []byte, body func([]byte) ([]byte, error)) ([]byte, error) {
	start := len(b)
	out, err := body(append(b, 0, 0, 0, 0))
	if err != nil {
		return nil, err
	}
	n := len(out) - start - 4
	if n > MaxFrame {
		return nil, fault.New(fault.TooLarge, "frame of %d bytes, at most %d", n, MaxFrame)
	}
	binary.BigEndian.PutUint32(out[start:], uint32(n))
	return out, nil
}
