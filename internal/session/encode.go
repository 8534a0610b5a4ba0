package session

import (
	"encoding/binary"
	"slices"

	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
)

// Clone returns an independent copy. remap returns what stands in the copy for
// a request's ref and message.
func (s *Session[T]) Clone(remap func(ref T, m msg.Message) (T, msg.Message)) Session[T] {
	t := *s
	t.actions = nil
	t.reply.Links = slices.Clone(s.reply.Links)
	t.calls = calls[T]{}
	t.calls.init(s.calls.seq)
	for e := s.calls.first; e != nil; e = e.next {
		ref, m := remap(e.ref, e.msg)
		t.calls.link(&call[T]{seq: e.seq, msg: m, ref: ref})
	}
	return t
}

// Encode appends the state: equal states give equal bytes. Times are relative
// to now. ref appends what a request's ref stands for.
func (s *Session[T]) Encode(b []byte, now kv.Instant, ref func([]byte, T) []byte) []byte {
	u := func(vs ...uint64) {
		for _, v := range vs {
			b = binary.AppendUvarint(b, v)
		}
	}
	u(uint64(s.state), flag(s.wanted), flag(s.opened), uint64(s.conn), uint64(s.conns), uint64(s.backoff), s.calls.seq)
	for _, at := range []kv.Instant{max(s.dialAt, now), s.since, s.idleAt} {
		b = AppendTime(b, now, at)
	}
	if s.state == up || s.state == foreign {
		b = AppendTime(b, now, max(s.upAt, now.Add(-LastBackoff)))
	}
	if s.state == greeting {
		u(s.helloSeq)
		b = AppendTime(b, now, s.helloAt)
	}
	b = AppendString(b, s.err)
	if !s.opened {
		return b
	}
	b = append(b, s.peer[:]...)
	u(s.opener, flag(s.Proved(s.upAt)))
	l := &s.lease
	u(uint64(l.length), uint64(l.n), uint64(s.reply.Capacity), uint64(len(s.reply.Links)))
	for _, o := range s.reply.Links {
		b = AppendString(AppendString(b, o.Name), o.Addr)
	}
	for _, at := range []kv.Instant{l.proof, l.heard, l.beatAt} {
		b = AppendTime(b, now, at)
	}
	for _, x := range l.beats[:l.n] {
		u(x.seq)
		b = AppendTime(b, now, x.at)
	}
	u(uint64(len(s.calls.bySeq)))
	for e := s.calls.first; e != nil; e = e.next {
		u(e.seq)
		b = ref(b, e.ref)
	}
	return b
}

func flag(v bool) uint64 {
	if v {
		return 1
	}
	return 0
}

// AppendTime appends a time relative to now; Never is Never at all times.
func AppendTime(b []byte, now, at kv.Instant) []byte {
	if at == kv.Never {
		return append(b, 0xff)
	}
	return binary.AppendVarint(append(b, 0), int64(at-now))
}

// AppendString appends a string with its length.
func AppendString(b []byte, s string) []byte {
	return append(binary.AppendUvarint(b, uint64(len(s))), s...)
}
