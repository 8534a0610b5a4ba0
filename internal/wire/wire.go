// Package wire turns control messages into bytes and back: the LMCache
// dialect byte for byte as Python's msgspec writes it, the Berth dialect and
// the init port's messages, as PROTOCOL.md sections 1 to 3 specify them. Each
// message is one table of fields in the file of its group.
//
// Decoding checks types, presence and limits and nothing else. It copies what
// it keeps, so a payload's buffer may be reused, and allocates no more than a
// small multiple of the payload.
package wire

import (
	"fmt"

	"github.com/berthkv/berth/internal/msg"
	"github.com/berthkv/berth/internal/msgpack"
)

// tag is the key that holds a message's name.
const tag = "type"

// Decode reads one control message of either dialect. The error is an *Error.
func Decode(b []byte) (msg.Message, error) {
	if len(b) > MaxMessage {
		return nil, &Error{Kind: Malformed, Text: fmt.Sprintf("message of %d bytes, at most %d", len(b), MaxMessage)}
	}
	name, err := peekType(b)
	if err != nil {
		return nil, describe(b, Malformed, "", err)
	}
	k, ok := kinds[string(name)]
	if !ok {
		return nil, describe(b, UnknownType, string(name), fmt.Errorf("unknown message %q", name))
	}
	m, err := k(b)
	if err != nil {
		return nil, describe(b, Malformed, string(name), err)
	}
	return m, nil
}

// kinds has the decoder of each message by its name.
var kinds = map[string]func([]byte) (msg.Message, error){}

// kind is one message: its name and its fields.
type kind[T any] struct {
	name  string
	head  []byte // the entry of the tag, encoded
	table *msgpack.Table[T]
}

func makeKind[T any](name string, fields []msgpack.Field[T]) *kind[T] {
	w := msgpack.NewWriter(nil)
	w.Key(tag)
	w.Key(name)
	head, _ := w.Bytes()
	return &kind[T]{name, head, msgpack.NewTable(fields...)}
}

// newKind registers a control message.
func newKind[T any, P interface {
	*T
	msg.Message
}](name string, fields ...msgpack.Field[T]) *kind[T] {
	k := makeKind(name, fields)
	kinds[name] = func(b []byte) (msg.Message, error) {
		m, err := k.decode(b)
		return P(m), err
	}
	return k
}

func (k *kind[T]) decode(b []byte) (*T, error) {
	r := msgpack.NewReader(b)
	m := new(T)
	k.table.Get(r, m, tag, k.name)
	r.End()
	return m, r.Err()
}

func (k *kind[T]) append(b []byte, m *T) ([]byte, error) {
	w := msgpack.NewWriter(b)
	w.Map(1 + k.table.Len(m))
	w.Raw(k.head)
	k.table.Put(w, m)
	b, err := w.Bytes()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", k.name, err)
	}
	return b, nil
}

// Append writes m, which is not nil, after b. It errs, with b's contents
// undefined beyond its length, when a field is over its limit, is not UTF-8 or
// misses its number: on a caller's mistake.
func Append(b []byte, m msg.Message) ([]byte, error) {
	switch m := m.(type) {
	case *msg.AllocRequest:
		return allocRequest.append(b, m)
	case *msg.AllocResponse:
		return allocResponse.append(b, m)
	case *msg.ProxyNotif:
		return proxyNotif.append(b, m)
	case *msg.CancelNotif:
		return cancelNotif.append(b, m)
	case *msg.Hello:
		return hello.append(b, m)
	case *msg.HelloReply:
		return helloReply.append(b, m)
	case *msg.Begin:
		return begin.append(b, m)
	case *msg.Granted:
		return granted.append(b, m)
	case *msg.Commit:
		return commit.append(b, m)
	case *msg.CommitReply:
		return commitReply.append(b, m)
	case *msg.Cancel:
		return cancel.append(b, m)
	case *msg.Ended:
		return ended.append(b, m)
	case *msg.Drained:
		return drained.append(b, m)
	case *msg.Watch:
		return watch.append(b, m)
	case *msg.Ready:
		return ready.append(b, m)
	case *msg.Heartbeat:
		return heartbeat.append(b, m)
	case *msg.HeartbeatReply:
		return heartbeatReply.append(b, m)
	case *msg.Error:
		return errorReply.append(b, m)
	case *msg.EndingNotice:
		return endingNotice.append(b, m)
	}
	return nil, fmt.Errorf("%T is no control message", m)
}

// peekType returns the value of the first key `type`; it aliases b.
func peekType(b []byte) ([]byte, error) {
	r := msgpack.NewReader(b)
	for range r.Map() {
		if string(r.Key()) == tag {
			name := r.StrZC(MaxName)
			if err := r.Err(); err != nil {
				return nil, fmt.Errorf("%s: %w", tag, err)
			}
			return name, nil
		}
		r.Skip()
	}
	if err := r.Err(); err != nil {
		return nil, err
	}
	return nil, fmt.Errorf("missing %s", tag)
}

// ErrorKind tells what a receiver does with a message that it cannot decode.
type ErrorKind uint8

const (
	// Malformed: not a map, a wrong type, a missing field, over a limit.
	Malformed ErrorKind = iota
	// UnknownType: a well-named message that this build does not know.
	UnknownType
)

// Error is why a payload is no message of ours, with what is needed to answer
// it.
type Error struct {
	Kind ErrorKind
	Type string // name of the message, "" if it could not be read
	Text string // names the field and both numbers
	Seq  uint64 // not 0: the message is a Berth request of that number
	Keys int    // keys of an LMCache message, as far as they could be read
}

func (e *Error) Error() string {
	if e.Type == "" || e.Kind == UnknownType {
		return e.Text
	}
	return e.Type + ": " + e.Text
}

// describe looks once more through a payload that is no message, for what an
// answer needs, as far as it can be read.
func describe(b []byte, kind ErrorKind, name string, err error) *Error {
	e := &Error{Kind: kind, Type: name, Text: err.Error()}
	r := msgpack.NewReader(b)
	for range r.Map() {
		switch string(r.Key()) {
		case "seq":
			if seq := r.Uint(1<<64 - 1); r.Err() == nil {
				e.Seq = seq
			}
		case "keys":
			at := r.Rest()
			if n := msgpack.NewReader(at).Array(MaxKeys); n > 0 {
				e.Keys = n
			}
			r.Skip()
		default:
			r.Skip()
		}
		if r.Err() != nil {
			break
		}
	}
	return e
}
