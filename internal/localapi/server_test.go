package localapi

import (
	"encoding/binary"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience is how long a test waits for what must come.
const patience = 20 * time.Second

// happening is one call of the Handler.
type happening struct {
	kind string
	conn kv.ConnID
	call kv.CallID
	req  Request
	cred Cred
	pid  int
}

// recorder is a Handler that passes on what happens.
type recorder chan happening

func (r recorder) Connected(conn kv.ConnID, cred Cred) {
	r <- happening{kind: "connected", conn: conn, cred: cred}
}
func (r recorder) Request(conn kv.ConnID, call kv.CallID, req Request) {
	r <- happening{kind: "request", conn: conn, call: call, req: req}
}
func (r recorder) Hangup(call kv.CallID)       { r <- happening{kind: "hangup", call: call} }
func (r recorder) Disconnected(conn kv.ConnID) { r <- happening{kind: "disconnected", conn: conn} }
func (r recorder) ProcessGone(pid int)         { r <- happening{kind: "gone", pid: pid} }

// next returns what happens next, which must be of that kind.
func (r recorder) next(t *testing.T, kind string) happening {
	t.Helper()
	select {
	case h := <-r:
		if h.kind != kind {
			t.Fatalf("%+v, want %s", h, kind)
		}
		return h
	case <-time.After(patience):
		t.Fatalf("no %s", kind)
	}
	panic("unreachable")
}

func start(t *testing.T, change func(*Config)) (*Server, recorder) {
	t.Helper()
	h := make(recorder, 10_000)
	cfg := Config{Path: filepath.Join(t.TempDir(), "run", "a.sock"), Handler: h}
	if change != nil {
		change(&cfg)
	}
	s, err := Listen(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s, h
}

// raw is a client by hand.
type raw struct {
	t *testing.T
	*net.UnixConn
}

func dial(t *testing.T, s *Server) raw {
	t.Helper()
	c, err := net.Dial("unix", s.Path())
	if err != nil {
		t.Fatal(err)
	}
	c.SetDeadline(time.Now().Add(patience))
	t.Cleanup(func() { c.Close() })
	return raw{t, c.(*net.UnixConn)}
}

func (c raw) send(id uint64, req Request) {
	c.t.Helper()
	b, err := appendFrame(nil, func(b []byte) ([]byte, error) { return AppendRequest(b, id, req) })
	if err != nil {
		c.t.Fatal(err)
	}
	c.Write(b) // that the other end is gone, is seen when reading
}

func (c raw) frame(payload []byte) {
	c.t.Helper()
	if _, err := c.Write(append(binary.BigEndian.AppendUint32(nil, uint32(len(payload))), payload...)); err != nil {
		c.t.Fatal(err)
	}
}

func (c raw) receive() (Reply, []byte) {
	c.t.Helper()
	var n [4]byte
	_, err := io.ReadFull(c, n[:])
	b := make([]byte, binary.BigEndian.Uint32(n[:]))
	if err == nil {
		_, err = io.ReadFull(c, b)
	}
	var reply Reply
	if err == nil {
		reply, err = DecodeReply(b)
	}
	if err != nil {
		c.t.Fatal(err)
	}
	return reply, b
}

// closed expects the server to close the connection.
func (c raw) closed() {
	c.t.Helper()
	if n, err := c.Read(make([]byte, 1)); n > 0 || err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		c.t.Fatalf("%d bytes, %v, want the connection closed", n, err)
	}
}

// connect dials and waits until the server has the connection.
func connect(t *testing.T, s *Server, h recorder) (raw, kv.ConnID) {
	t.Helper()
	c := dial(t, s)
	return c, h.next(t, "connected").conn
}

func TestServer(t *testing.T) {
	s, h := start(t, nil)
	c := dial(t, s)
	on := h.next(t, "connected")
	if on.cred.PID != os.Getpid() || int(on.cred.UID) != os.Getuid() {
		t.Errorf("the peer is %+v, want pid %d, uid %d", on.cred, os.Getpid(), os.Getuid())
	}
	// Two calls, answered in the other order, with an event between.
	c.send(7, &Stage{Req: "r", N: 2})
	c.send(8, &Wait{Req: "r"})
	stage, wait := h.next(t, "request"), h.next(t, "request")
	if stage.conn != on.conn || stage.req.(*Stage).N != 2 || wait.req.(*Wait).Req != "r" || stage.call == wait.call {
		t.Errorf("%+v, %+v", stage, wait)
	}
	s.Answer(wait.call, &Ending{Ending: msg.EndReady})
	s.Emit(on.conn, &Granted{Req: "r"})
	s.Fail(stage.call, fault.New(fault.Holding, "2 held"))
	s.Answer(stage.call, &Slots{}) // answered already
	s.Fail(stage.call, fault.New(fault.Internal, ""))
	s.Emit(on.conn+1, &Granted{}) // no such connection
	s.CloseConn(on.conn + 1)
	if r, _ := c.receive(); r.ID != 8 || r.Err != nil {
		t.Errorf("%+v", r)
	}
	if r, _ := c.receive(); r.HasID || r.Event.(*Granted).Req != "r" {
		t.Errorf("%+v", r)
	}
	if r, _ := c.receive(); r.ID != 7 || r.Err.Code != fault.Holding || r.Err.Text != "2 held" {
		t.Errorf("%+v", r)
	}
	c.Close()
	if off := h.next(t, "disconnected"); off.conn != on.conn {
		t.Errorf("%+v", off)
	}
}

func TestCloseConnFlushes(t *testing.T) {
	s, h := start(t, nil)
	c, id := connect(t, s, h)
	c.send(1, &Hello{})
	s.Fail(h.next(t, "request").call, fault.New(fault.LayoutMismatch, "tp_size 1, 2"))
	s.CloseConn(id)
	if r, _ := c.receive(); r.Err == nil || r.Err.Code != fault.LayoutMismatch {
		t.Errorf("%+v", r)
	}
	c.closed()
	h.next(t, "disconnected")
}

func TestHangup(t *testing.T) {
	s, h := start(t, nil)
	c, _ := connect(t, s, h)
	c.send(1, &Wait{Req: "r"})
	wait := h.next(t, "request")
	c.send(2, &Hangup{Call: 1})
	if up := h.next(t, "hangup"); up.call != wait.call {
		t.Errorf("%+v, want call %d", up, wait.call)
	}
	s.Fail(wait.call, fault.New(fault.Cancelled, ""))
	got := map[uint64]Reply{}
	for range 2 {
		r, _ := c.receive()
		got[r.ID] = r
	}
	if got[2].Err != nil || got[1].Err == nil || got[1].Err.Code != fault.Cancelled {
		t.Errorf("%+v", got)
	}
	// Unknown calls, and a hangup of itself, are answered and that is all.
	c.send(3, &Hangup{Call: 99})
	c.send(4, &Hangup{Call: 4})
	for range 2 {
		if r, _ := c.receive(); r.Err != nil {
			t.Errorf("%+v", r)
		}
	}
	// A lost connection hangs up what is unanswered.
	c.send(5, &Wait{Req: "r"})
	wait = h.next(t, "request")
	c.Close()
	if up := h.next(t, "hangup"); up.call != wait.call {
		t.Errorf("%+v, want call %d", up, wait.call)
	}
	h.next(t, "disconnected")
	s.Answer(wait.call, &Ending{Ending: msg.EndReady}) // nobody is there
}

// TestGarbage: what is no frame costs only its own connection.
func TestGarbage(t *testing.T) {
	s, h := start(t, nil)
	good, _ := connect(t, s, h)
	for name, b := range map[string]string{
		"http":        "GET / HTTP/1.1\r\n\r\n",
		"empty frame": "\x00\x00\x00\x00",
		"huge frame":  "\x01\x00\x00\x01",
		"no map":      "\x00\x00\x00\x01\xc0",
		"no id":       "\x00\x00\x00\x01\x80",
		"bad byte":    "\x00\x00\x00\x01\xc1",
	} {
		bad, _ := connect(t, s, h)
		if _, err := bad.Write([]byte(b)); err != nil {
			t.Fatal(name, err)
		}
		bad.closed()
		h.next(t, "disconnected")
		good.send(1, &Status{})
		s.Answer(h.next(t, "request").call, &StatusAnswer{Status: name})
		if r, _ := good.receive(); r.Err != nil {
			t.Errorf("%s: %+v", name, r)
		}
	}
	// With a readable id it is answered, and the connection lives.
	good.frame(pairs{"id", 5, "op", "fly"}.bytes())
	if r, _ := good.receive(); r.ID != 5 || r.Err == nil || r.Err.Code != fault.UnknownMessage {
		t.Errorf("%+v", r)
	}
	good.frame(pairs{"id", 6, "op", "claim"}.bytes())
	if r, _ := good.receive(); r.ID != 6 || r.Err == nil || r.Err.Code != fault.BadRequest {
		t.Errorf("%+v", r)
	}
	// Half a frame, and then nothing more.
	half, _ := connect(t, s, h)
	half.Write([]byte("\x00\x01\x00\x00\x80"))
	half.CloseWrite()
	half.closed()
	h.next(t, "disconnected")
}

func TestLargestFrame(t *testing.T) {
	s, h := start(t, nil)
	c, _ := connect(t, s, h)
	padded := func(n int) []byte {
		head := len(pairs{"id", 1, "op", "status", "pad", make([]byte, 1<<16)}.bytes()) - 1<<16
		return pairs{"id", 1, "op", "status", "pad", make([]byte, n-head)}.bytes()
	}
	c.frame(padded(MaxFrame))
	call := h.next(t, "request").call
	s.Answer(call, &StatusAnswer{Status: strings.Repeat("x", MaxFrame)}) // too large with the rest
	if r, _ := c.receive(); r.ID != 1 || r.Err == nil || r.Err.Code != fault.TooLarge {
		t.Errorf("%+v", r)
	}
	c.send(2, &Status{})
	big := strings.Repeat("x", MaxFrame-64)
	s.Answer(h.next(t, "request").call, &StatusAnswer{Status: big})
	r, b := c.receive()
	if a, err := DecodeAnswer(b, &Status{}); r.ID != 2 || err != nil || a.(*StatusAnswer).Status != big {
		t.Errorf("%+v, %v", r, err)
	}
	// One byte more is no request: the connection is closed before it is read.
	c.Write(append([]byte("\x01\x00\x00\x01"), padded(MaxFrame+1)...))
	h.next(t, "disconnected")
}

func TestCallsLimit(t *testing.T) {
	s, h := start(t, nil)
	c, _ := connect(t, s, h)
	for id := range uint64(MaxCalls) {
		c.send(id, &Wait{Req: "r"})
	}
	var first kv.CallID
	for range MaxCalls {
		if call := h.next(t, "request").call; first == 0 {
			first = call
		}
	}
	c.send(MaxCalls, &Wait{Req: "r"})
	if r, _ := c.receive(); r.ID != MaxCalls || r.Err == nil || r.Err.Code != fault.Busy {
		t.Errorf("%+v", r)
	}
	s.Answer(first, &Ending{Ending: msg.EndReady})
	c.receive()
	c.send(MaxCalls, &Wait{Req: "r"})
	h.next(t, "request")
	// The id of an unanswered call again: the answers could not be told apart.
	c.send(MaxCalls, &Wait{Req: "r"})
	c.closed()
	for range MaxCalls {
		h.next(t, "hangup")
	}
	h.next(t, "disconnected")
}

func TestConnectionsLimit(t *testing.T) {
	s, h := start(t, nil)
	conns := make([]raw, MaxConns)
	for i := range conns {
		conns[i], _ = connect(t, s, h)
		conns[i].send(1, &Status{})
		h.next(t, "request")
	}
	dial(t, s).closed()
	conns[0].Close()
	h.next(t, "hangup")
	h.next(t, "disconnected")
	connect(t, s, h)
}

// Connections that have said nothing keep nobody out: at the limit the oldest of
// them goes, and who has spoken stays.
func TestSilentConnectionsMakeRoom(t *testing.T) {
	s, h := start(t, nil)
	engine, on := connect(t, s, h)
	engine.send(1, &Status{})
	call := h.next(t, "request").call
	silent := make([]raw, MaxConns-1)
	for i := range silent {
		silent[i], _ = connect(t, s, h)
	}
	for _, oldest := range silent[:3] {
		c := dial(t, s)
		oldest.closed()
		var came, went kv.ConnID
		for range 2 { // in either order
			select {
			case e := <-h:
				switch e.kind {
				case "connected":
					came = e.conn
				case "disconnected":
					went = e.conn
				}
			case <-time.After(patience):
				t.Fatalf("connection %d came and %d went: not both", came, went)
			}
		}
		c.send(7, &Status{})
		r := h.next(t, "request")
		if r.conn != came || went == on {
			t.Fatalf("connection %d came, %d went, %d speaks", came, went, r.conn)
		}
		s.Answer(r.call, &StatusAnswer{Status: "{}"})
		if r, _ := c.receive(); r.ID != 7 || r.Err != nil {
			t.Fatalf("the newcomer: %+v", r)
		}
	}
	s.Answer(call, &StatusAnswer{Status: "{}"})
	if r, _ := engine.receive(); r.ID != 1 || r.Err != nil {
		t.Errorf("the engine: %+v", r)
	}
}

func TestThousandConnects(t *testing.T) {
	s, h := start(t, nil)
	before := descriptors(t)
	var wg sync.WaitGroup
	for range 10 {
		wg.Go(func() {
			for range 100 {
				c, err := net.Dial("unix", s.Path())
				if err != nil {
					t.Error(err)
					return
				}
				c.Write([]byte("\x00\x00"))
				c.Close()
			}
		})
	}
	wg.Wait()
	// Connections are accepted in order: once the last one is, all are, but for
	// those refused at the limit. Every one that came goes.
	refused := make(chan struct{}, 1)
	var last raw
	var knocks sync.WaitGroup
	knock := func() {
		last = dial(t, s)
		last.send(1, &Status{})
		c := last
		knocks.Go(func() {
			c.Read(make([]byte, 1)) // nothing is answered: it is refused, or closed below
			c.Close()
			refused <- struct{}{} // there is room: one knocks at a time
		})
	}
	knock()
	for open, closing := 0, false; !closing || open > 0; {
		select {
		case <-refused:
			if !closing {
				knock()
			}
		case e := <-h:
			switch e.kind {
			case "connected":
				open++
			case "disconnected":
				open--
			case "request":
				closing = true
				last.Close()
			}
		case <-time.After(patience):
			t.Fatalf("%d connections are left", open)
		}
	}
	knocks.Wait()
	if after := descriptors(t); after > before {
		t.Errorf("%d descriptors, %d before", after, before)
	}
}

func descriptors(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

// TestReadsNothing: an engine that reads nothing is cut off, others go on.
func TestReadsNothing(t *testing.T) {
	s, h := start(t, nil)
	_, deaf := connect(t, s, h)
	good, _ := connect(t, s, h)
	event := &Ended{Req: "r", Ending: msg.EndFailed, Text: strings.Repeat("x", 4000)}
	for range 2 * MaxBacklog / 4000 {
		s.Emit(deaf, event)
	}
	if off := h.next(t, "disconnected"); off.conn != deaf {
		t.Errorf("%+v", off)
	}
	good.send(1, &Status{})
	s.Answer(h.next(t, "request").call, &StatusAnswer{})
	good.receive()
}

func TestSilentConnection(t *testing.T) {
	s, h := start(t, func(c *Config) { c.HelloTimeout = time.Millisecond })
	c, _ := connect(t, s, h)
	c.closed()
	h.next(t, "disconnected")
}

func TestCloseWithConnections(t *testing.T) {
	before := descriptors(t)
	s, h := start(t, nil)
	c, id := connect(t, s, h)
	deaf, deafID := connect(t, s, h)
	c.send(1, &Wait{Req: "r"})
	h.next(t, "request")
	s.Emit(id, &Granted{Req: "r"})
	for range 1000 {
		s.Emit(deafID, &Ended{Req: "r", Ending: msg.EndReady, Text: strings.Repeat("x", 4000)})
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if err := s.Close(); err != nil {
		t.Error("the second close:", err)
	}
	if r, _ := c.receive(); r.Event == nil {
		t.Errorf("%+v", r)
	}
	c.closed()
	c.Close()
	deaf.Close()
	if _, err := os.Stat(s.Path()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket is left: %v", err)
	}
	kinds := map[string]int{}
	for len(h) > 0 {
		kinds[(<-h).kind]++
	}
	if kinds["hangup"] != 1 || kinds["disconnected"] != 2 || len(kinds) != 2 {
		t.Errorf("%v", kinds)
	}
	if after := descriptors(t); after > before {
		t.Errorf("%d descriptors, %d before", after, before)
	}
}

func TestListen(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "run", "a.sock")
	handler := make(recorder, 10)
	s, err := Listen(Config{Path: path, Handler: handler})
	if err != nil {
		t.Fatal(err)
	}
	for file, want := range map[string]os.FileMode{path: 0o600, filepath.Dir(path): 0o700} {
		if st, err := os.Stat(file); err != nil || st.Mode().Perm() != want {
			t.Errorf("%s: %v, %v, want %v", file, st.Mode(), err, want)
		}
	}
	// A live one stays.
	if _, err := Listen(Config{Path: path, Handler: handler}); err == nil || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), "running") {
		t.Errorf("a second server: %v", err)
	}
	if c, err := net.Dial("unix", path); err != nil {
		t.Errorf("the first is gone: %v", err)
	} else {
		c.Close()
	}
	s.Close()

	// One that is not ours, live and then dead.
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	if _, err := Listen(Config{Path: path, Handler: handler}); err == nil || !strings.Contains(err.Error(), path) {
		t.Errorf("over a live socket: %v", err)
	}
	l.Close()
	s, err = Listen(Config{Path: path, Handler: handler})
	if err != nil {
		t.Fatalf("over a dead socket: %v", err)
	}
	s.Close()

	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, bad := range []string{"", file, filepath.Join(dir, strings.Repeat("x", 200)), filepath.Join(file, "a.sock")} {
		if _, err := Listen(Config{Path: bad, Handler: handler}); err == nil || !strings.Contains(err.Error(), bad) {
			t.Errorf("at %q: %v", bad, err)
		}
	}
	if b, _ := os.ReadFile(file); string(b) != "precious" {
		t.Errorf("the file is %q", b)
	}
}
