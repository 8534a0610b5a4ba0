package session

import (
	"fmt"
	"math/rand"
	"testing"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
)

// ledger is what an owner must be able to believe, kept by the simplest means:
// which requests it has made in this session, and which were answered.
type ledger struct {
	asked    map[int]bool // by ref; true: answered
	order    []int
	opened   bool
	dialled  map[kv.ConnID]bool
	dropped  map[kv.ConnID]bool
	lastSeq  uint64
	greeting map[kv.ConnID]int // messages sent on it
}

// FuzzSteps lets a fuzzer be the network and a receiver that says anything. It
// holds: the invariants; a request is answered at most once, and only in the
// session in which it was made; a seq is never used for two requests; nothing
// goes out before Hello on a connection, nothing on one that was closed; a
// resumed session repeats exactly what is unanswered, in order.
func FuzzSteps(f *testing.F) {
	f.Add([]byte("hello, hello again, and goodbye"))
	for seed := range int64(12) {
		b := make([]byte, 240)
		rand.New(rand.NewSource(seed)).Read(b)
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		pick := func(n int) int {
			if len(b) == 0 {
				return 0
			}
			x := int(b[0]) % n
			b = b[1:]
			return x
		}
		s := New[int](testConfig(), uint64(pick(3)))
		l := &ledger{asked: map[int]bool{}, dialled: map[kv.ConnID]bool{}, dropped: map[kv.ConnID]bool{}, greeting: map[kv.ConnID]int{}}
		now, ref := kv.Instant(0), 0
		var conns []kv.ConnID
		for step := 0; len(b) > 0 && step < 400; step++ {
			now = now.Add(kv.Duration(pick(16)/12*pick(30)) * kv.Second / 2)
			conn := kv.ConnID(3)<<32 | 77 // nobody's
			if len(conns) > 0 {
				conn = conns[max(0, len(conns)-1-pick(8)/7)]
			}
			seq := s.LastSeq() - min(s.LastSeq(), uint64(pick(4)))
			var n Notice[int]
			what := pick(20)
			switch what {
			case 0, 1:
				s.Want(now, true)
			case 2:
				s.Want(now, false)
			case 3, 4, 5:
				s.Connected(now, conn)
			case 6:
				n = s.Disconnected(now, conn, "reset")
			case 7:
				n = s.Malformed(now, conn, "garbage")
			case 8, 9:
				if s.Opened() {
					ref++
					l.asked[ref] = false
					l.order = append(l.order, ref)
					s.Request(&msg.Begin{Begin: uint64(ref)}, ref)
				}
			case 10:
				s.Answer(&msg.Drained{Re: seq})
			case 11:
				s.Prove(now)
			case 12:
				s.Stopped(now)
			case 13:
				if pick(8) == 0 {
					s.Quit()
				}
			default:
				n = s.Received(now, conn, []msg.Message{
					&msg.HelloReply{Re: seq, Version: uint64(1 + pick(16)/15), LeaseMS: int64(pick(16)) * 1000, Incarnation: kv.Incarnation{byte(pick(2))}, Resumed: pick(2) == 0},
					&msg.HelloReply{Re: s.LastSeq(), Version: 1, LeaseMS: 9000, Resumed: true},
					&msg.Granted{Re: seq}, &msg.CommitReply{Re: seq}, &msg.HeartbeatReply{Re: seq},
					&msg.Ended{Re: seq * uint64(pick(2)), Seq: uint64(pick(5))},
					&msg.Error{Re: seq, Code: fault.Codes[pick(len(fault.Codes))], RetryMS: int64(pick(5)) * 100},
					&msg.AllocResponse{}, &msg.ProxyNotif{},
				}[pick(9)])
			}
			if err := l.see(&s, n); err != nil {
				t.Fatalf("step %d, move %d: %v", step, what, err)
			}
			conns = append(conns, l.take()...)
			for ticks := 0; s.Next() <= now; ticks++ {
				if ticks > 20 {
					t.Fatalf("step %d: it wakes for ever", step)
				}
				if err := l.see(&s, s.Tick(now)); err != nil {
					t.Fatalf("step %d, tick: %v", step, err)
				}
				conns = append(conns, l.take()...)
			}
			if err := s.Check(); err != nil {
				t.Fatalf("step %d, move %d: %v", step, what, err)
			}
			twin := s.Clone(func(ref int, m msg.Message) (int, msg.Message) { return ref, m })
			enc := func(s *Session[int]) string {
				return string(s.Encode(nil, now, func(b []byte, ref int) []byte { return append(b, byte(ref)) }))
			}
			if enc(&s) != enc(&twin) {
				t.Fatalf("step %d: a copy encodes otherwise", step)
			}
		}
	})
}

// see judges one call's notice and actions.
func (l *ledger) see(s *Session[int], n Notice[int]) error {
	var repeated []int
	for _, a := range s.Actions() {
		switch a.Do {
		case Dial:
			if _, ok := l.dialled[a.Conn]; ok || Owner(a.Conn) != 3 {
				return fmt.Errorf("connection %d is dialled again", a.Conn)
			}
			l.dialled[a.Conn] = false
		case Close:
			if l.dropped[a.Conn] {
				return fmt.Errorf("connection %d is closed twice", a.Conn)
			}
			l.dropped[a.Conn] = true
		case Send:
			if _, ok := l.dialled[a.Conn]; !ok || l.dropped[a.Conn] {
				return fmt.Errorf("%T goes out on connection %d, dialled %v, closed %v", a.Msg, a.Conn, ok, l.dropped[a.Conn])
			}
			h, hello := a.Msg.(*msg.Hello)
			if first := l.greeting[a.Conn] == 0; first != hello {
				return fmt.Errorf("message %d of a connection is %T", l.greeting[a.Conn], a.Msg)
			}
			l.greeting[a.Conn]++
			if hello {
				if h.Seq <= l.lastSeq {
					return fmt.Errorf("hello has seq %d after %d", h.Seq, l.lastSeq)
				}
				l.lastSeq = h.Seq
			}
			if m, ok := a.Msg.(*msg.Begin); ok {
				if n.Kind == Resumed {
					repeated = append(repeated, int(m.Begin))
				} else if m.Seq <= l.lastSeq {
					return fmt.Errorf("a new request has seq %d after %d", m.Seq, l.lastSeq)
				}
				l.lastSeq = max(l.lastSeq, m.Seq)
			}
		}
	}
	if n.Kind == Resumed {
		var want []int
		for _, ref := range l.order {
			if answered, live := l.asked[ref]; live && !answered {
				want = append(want, ref)
			}
		}
		if fmt.Sprint(repeated) != fmt.Sprint(want) {
			return fmt.Errorf("resumed with requests %v, unanswered are %v", repeated, want)
		}
	}
	if n.Kind == Reply {
		answered, live := l.asked[n.Ref]
		if !live || answered {
			return fmt.Errorf("request %d, live %v, answered %v, is answered", n.Ref, live, answered)
		}
		l.asked[n.Ref] = true
	}
	if n.Kind == Up || n.Kind == Lost || n.Kind == Refused || n.Kind == Legacy || l.opened && !s.Opened() {
		clear(l.asked)
		l.order = l.order[:0]
	}
	if l.opened = s.Opened(); !l.opened && s.Unanswered() > 0 {
		return fmt.Errorf("%d requests are unanswered without a session", s.Unanswered())
	}
	left := 0
	for _, answered := range l.asked {
		if !answered {
			left++
		}
	}
	if left != s.Unanswered() {
		return fmt.Errorf("%d requests are unanswered, should be %d", s.Unanswered(), left)
	}
	return nil
}

// take returns the connections dialled since the last call.
func (l *ledger) take() (fresh []kv.ConnID) {
	for c, seen := range l.dialled {
		if !seen {
			l.dialled[c] = true
			fresh = append(fresh, c)
		}
	}
	return fresh
}
