package zmtp

import (
	"errors"
	"io"
	"net"
	"testing"
	"time"
)

func TestHeartbeatDecisions(t *testing.T) {
	const s = time.Second
	type step struct {
		now, heard, pinged, ttl time.Duration
		ping, dead              bool
		wait                    time.Duration
	}
	for _, tc := range []struct {
		name              string
		interval, timeout time.Duration
		yields            bool
		steps             []step
	}{
		{"answered", 3 * s, 10 * s, false, []step{
			{now: 3 * s, heard: 1 * s, ping: true, wait: 3 * s},
			{now: 6 * s, heard: 4 * s, ping: true, wait: 3 * s},
			{now: 9 * s, heard: 7 * s, ping: true, wait: 3 * s},
		}},
		{"silent", 3 * s, 10 * s, false, []step{
			{now: 3 * s, ping: true, wait: 3 * s},
			{now: 6 * s, ping: true, wait: 3 * s},
			{now: 9 * s, ping: true, wait: 3 * s},
			{now: 12 * s, ping: true, wait: 1 * s}, // 10 s after the first unanswered one
			{now: 13*s - 1, wait: 1},
			{now: 13 * s, dead: true},
		}},
		{"one byte counts for all PINGs before it", 3 * s, 10 * s, false, []step{
			{now: 3 * s, ping: true, wait: 3 * s},
			{now: 6 * s, ping: true, wait: 3 * s},
			{now: 9 * s, heard: 8 * s, ping: true, wait: 3 * s},
			{now: 13 * s, heard: 8 * s, ping: true, wait: 3 * s},
			{now: 19 * s, heard: 8 * s, dead: true},
		}},
		{"timeout before the next PING", 10 * s, 1 * s, false, []step{
			{now: 10 * s, ping: true, wait: 1 * s},
			{now: 11 * s, dead: true},
		}},
		{"no PINGs", -1, 10 * s, false, []step{{now: 100 * s}}},
		{"only the peer's TTL", -1, 10 * s, false, []step{
			{now: 5 * s, heard: 4 * s, ttl: 2 * s, wait: 1 * s},
			{now: 6*s - 1, heard: 4 * s, ttl: 2 * s, wait: 1},
			{now: 6 * s, heard: 4 * s, ttl: 2 * s, dead: true},
		}},
		{"TTL before the next PING", 3 * s, 10 * s, false, []step{
			{now: 3 * s, heard: 2 * s, ttl: 2 * s, ping: true, wait: 1 * s},
		}},
		{"the peer asks", 3 * s, 10 * s, true, []step{
			{now: 3 * s, heard: 3 * s, pinged: 3 * s, ttl: 13 * s, wait: 13 * s},
			{now: 16 * s, heard: 15 * s, pinged: 15 * s, ttl: 13 * s, wait: 12 * s},
			{now: 28 * s, heard: 15 * s, pinged: 15 * s, ttl: 13 * s, dead: true},
		}},
		{"it asks no more, but speaks", 3 * s, 10 * s, true, []step{
			{now: 3 * s, heard: 3 * s, pinged: 3 * s, ttl: 13 * s, wait: 13 * s},
			{now: 16 * s, heard: 15 * s, pinged: 3 * s, ttl: 13 * s, ping: true, wait: 3 * s},
			{now: 19 * s, heard: 18 * s, pinged: 3 * s, ttl: 13 * s, ping: true, wait: 3 * s},
		}},
		{"its TTL is an hour", 3 * s, 10 * s, true, []step{
			{now: 3 * s, heard: 3 * s, pinged: 3 * s, ttl: 3600 * s, wait: 13 * s},
			{now: 16 * s, heard: 3 * s, pinged: 3 * s, ttl: 3600 * s, ping: true, wait: 3 * s},
			{now: 26 * s, heard: 3 * s, pinged: 3 * s, ttl: 3600 * s, dead: true},
		}},
		{"it announces none", 3 * s, 10 * s, true, []step{
			{now: 3 * s, heard: 3 * s, pinged: 3 * s, ping: true, wait: 3 * s},
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			h := heartbeat{interval: tc.interval, timeout: tc.timeout, yields: tc.yields, nextPing: tc.interval}
			for i, st := range tc.steps {
				ping, dead, wait := h.tick(st.now, st.heard, st.pinged, st.ttl)
				if ping != st.ping || dead != st.dead || wait != st.wait {
					t.Fatalf("step %d: ping %v dead %v wait %v, want %+v", i, ping, dead, wait, st)
				}
			}
		})
	}
}

// rawPeer is a handshaken bare connection to a Router.
type rawPeer struct {
	*net.TCPConn
	in *reader
}

func startRawPeer(t testing.TB, r *Router, minor byte) *rawPeer {
	t.Helper()
	return startRawPeerAs(t, r, minor, "raw")
}

func startRawPeerAs(t testing.TB, r *Router, minor byte, identity string) *rawPeer {
	t.Helper()
	tcp := dialRaw(t, r.Addr())
	h := hello(typeDealer, identity)
	h[11] = minor
	if _, err := tcp.Write(h); err != nil {
		t.Fatal(err)
	}
	p := &rawPeer{tcp, newReader(tcp, bigLimits)}
	if err := p.in.fill(greetingLen); err != nil {
		t.Fatal(err)
	}
	p.in.r += greetingLen
	p.command(t, "READY")
	return p
}

func (p *rawPeer) command(t testing.TB, want string) []byte {
	t.Helper()
	_, command, err := p.in.next()
	if err != nil {
		t.Fatal(err)
	}
	name, data, err := parseCommand(command)
	if err != nil || name != want {
		t.Fatalf("got %q, %v, want %s", name, err, want)
	}
	return data
}

// PING is answered with its context, and the application sees neither.
func TestPingIsAnswered(t *testing.T) {
	leakCheck(t)
	rec := &recorder{}
	r := startRouter(t, rec.handle, Options{})
	p := startRawPeer(t, r, 1)
	for _, ctx := range []string{"", "sixteen bytes ab"} {
		if _, err := p.Write(appendPing(nil, 0, []byte(ctx))); err != nil {
			t.Fatal(err)
		}
		if got := p.command(t, "PONG"); string(got) != ctx {
			t.Errorf("PONG with %q, want %q", got, ctx)
		}
	}
	unknown := appendCommand(nil, "WHATEVER", []byte("data"))
	if _, err := p.Write(append(unknown, appendMessage(nil, frames("", "end"))...)); err != nil {
		t.Fatal(err)
	}
	if e := rec.kind(t, Message, 0); text(e.Frames) != `["" "end"]` {
		t.Errorf("the first message is %q", e.Frames)
	}
}

func TestSilentPeerIsClosed(t *testing.T) {
	leakCheck(t)
	rec := &recorder{}
	r := startRouter(t, rec.handle, Options{HeartbeatInterval: 10 * time.Millisecond, HeartbeatTimeout: 60 * time.Millisecond})
	p := startRawPeer(t, r, 1)
	ttl, _, err := parsePing(p.command(t, "PING"))
	if err != nil || ttl != 1 { // 70 ms, in tenths of a second, rounded up
		t.Errorf("TTL %d, %v", ttl, err)
	}
	if e := rec.kind(t, Disconnected, 0); !errors.Is(e.Err, ErrHeartbeat) {
		t.Errorf("the end is %v", e.Err)
	}
	gone(t, p)
}

// A peer that only answers PINGs lives on.
func TestAnsweringPeerIsKept(t *testing.T) {
	leakCheck(t)
	rec := &recorder{}
	r := startRouter(t, rec.handle, Options{HeartbeatInterval: 10 * time.Millisecond, HeartbeatTimeout: 500 * time.Millisecond})
	d := startDealer(t, r.Addr(), nil, Options{HeartbeatInterval: -1})
	id := rec.kind(t, Connected, 0).Conn
	gone(t, startSilentPeer(t, r)) // which came later
	if err := r.Send(id, []byte("hi")); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Recv(testContext(t)); err != nil {
		t.Fatal(err)
	}
}

// A peer that announced a TTL and then says nothing is closed, also where we send no PINGs.
func TestPeersTTL(t *testing.T) {
	leakCheck(t)
	rec := &recorder{}
	r := startRouter(t, rec.handle, Options{HeartbeatInterval: -1})
	p := startRawPeer(t, r, 1)
	if _, err := p.Write(appendPing(nil, 1, nil)); err != nil {
		t.Fatal(err)
	}
	if e := rec.kind(t, Disconnected, 0); !errors.Is(e.Err, ErrHeartbeat) {
		t.Errorf("the end is %v", e.Err)
	}
}

// A peer that sends PINGs gets none itself from the end that it dialled, which asks others all the while.
func TestAskingPeerIsNotAsked(t *testing.T) {
	leakCheck(t)
	rec := &recorder{}
	r := startRouter(t, rec.handle, Options{HeartbeatInterval: 10 * time.Millisecond, HeartbeatTimeout: 20 * time.Second})
	p := startRawPeer(t, r, 1)
	if _, err := p.Write(appendPing(nil, 200, []byte("first"))); err != nil {
		t.Fatal(err)
	}
	for name := ""; name != "PONG"; { // until then it may be asked
		_, command, err := p.in.next()
		if err != nil {
			t.Fatal(err)
		}
		name, _, _ = parseCommand(command)
	}
	quiet := startRawPeerAs(t, r, 1, "quiet")
	for range 5 {
		quiet.command(t, "PING")
	}
	if _, err := p.Write(appendPing(nil, 200, []byte("second"))); err != nil {
		t.Fatal(err)
	}
	if got := p.command(t, "PONG"); string(got) != "second" {
		t.Errorf("PONG with %q", got)
	}
}

// A peer of ZMTP 3.0 does not know PING: it is neither asked nor given up.
func TestOldPeerGetsNoPing(t *testing.T) {
	leakCheck(t)
	rec := &recorder{}
	opts := Options{HeartbeatInterval: 5 * time.Millisecond, HeartbeatTimeout: 5 * time.Millisecond}
	r := startRouter(t, rec.handle, opts)
	p := startRawPeer(t, r, 0)
	id := rec.kind(t, Connected, 0).Conn
	gone(t, startSilentPeer(t, r)) // by now an asked peer would have been given up
	if err := r.Send(id, []byte("hi")); err != nil {
		t.Fatal(err)
	}
	if m, c, err := p.in.next(); err != nil || text(m) != `["hi"]` {
		t.Errorf("got %q, command %q, %v", m, c, err)
	}
}

// startSilentPeer is a bare peer of ZMTP 3.1 that neither answers nor reads.
func startSilentPeer(t testing.TB, r *Router) io.Reader {
	tcp := dialRaw(t, r.Addr())
	if _, err := tcp.Write(hello(typeDealer, "other")); err != nil {
		t.Fatal(err)
	}
	return tcp
}

// While our own handler is slow, the peer cannot be heard and is not blamed for it.
func TestSlowHandlerIsNotSilence(t *testing.T) {
	leakCheck(t)
	release := make(chan struct{})
	rec := &recorder{then: func(e Event) {
		if e.Kind == Message && e.Identity == "slow" {
			<-release
		}
	}}
	r := startRouter(t, rec.handle, Options{HeartbeatInterval: 5 * time.Millisecond, HeartbeatTimeout: 20 * time.Millisecond})
	d := startDealer(t, r.Addr(), nil, Options{Identity: []byte("slow"), HeartbeatInterval: -1})
	if err := d.Send([]byte("a")); err != nil {
		t.Fatal(err)
	}
	rec.kind(t, Message, 0)
	gone(t, startSilentPeer(t, r)) // longer than a heartbeat timeout
	close(release)
	if err := d.Send([]byte("b")); err != nil {
		t.Fatal(err)
	}
	rec.kind(t, Message, 1)
	if d.Err() != nil {
		t.Error(d.Err())
	}
}
