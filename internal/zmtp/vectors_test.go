package zmtp

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"
)

// session is a recorded TCP conversation between two libzmq sockets.
type session struct {
	Name, Client, Server string
	Options              struct {
		Identity string
		Ivl      int // heartbeat interval in ms; the TTL is 2 s
	}
	Messages       []exchanged
	ClientToServer string `json:"client_to_server"`
	ServerToClient string `json:"server_to_client"`
}

type exchanged struct {
	from   string
	frames [][]byte
}

func (e *exchanged) UnmarshalJSON(b []byte) error {
	var hexed []string
	if err := json.Unmarshal(b, &[]any{&e.from, &hexed}); err != nil {
		return err
	}
	for _, h := range hexed {
		f, err := hex.DecodeString(h)
		if err != nil {
			return err
		}
		e.frames = append(e.frames, f)
	}
	return nil
}

func loadVectors(t testing.TB) []session {
	t.Helper()
	b, err := os.ReadFile("testdata/zmtp.json")
	if err != nil {
		t.Fatal(err)
	}
	var file struct{ Sessions []session }
	if err := json.Unmarshal(b, &file); err != nil {
		t.Fatal(err)
	}
	if len(file.Sessions) == 0 {
		t.Fatal("no sessions")
	}
	return file.Sessions
}

func (s *session) bytes(t testing.TB) (client, server []byte) {
	t.Helper()
	client, err := hex.DecodeString(s.ClientToServer)
	if err != nil {
		t.Fatal(err)
	}
	server, err = hex.DecodeString(s.ServerToClient)
	if err != nil {
		t.Fatal(err)
	}
	return client, server
}

func (s *session) sent(by string) [][][]byte {
	var out [][][]byte
	for _, m := range s.Messages {
		if m.from == by {
			out = append(out, m.frames)
		}
	}
	return out
}

// options make our endpoint behave as the recorded one: libzmq's server of these sessions sent no PING of its own.
func (s *session) options(client bool) Options {
	o := Options{HeartbeatInterval: -1}
	if client {
		o.Identity = []byte(s.Options.Identity)
		if s.Options.Ivl > 0 {
			o.HeartbeatInterval = time.Duration(s.Options.Ivl) * time.Millisecond
			o.HeartbeatTimeout = 2*time.Second - o.HeartbeatInterval
		}
	}
	return o
}

// TestVectorsAsServer plays libzmq's client to our server: we send what libzmq's server sent, and see the same messages.
func TestVectorsAsServer(t *testing.T) {
	for _, s := range loadVectors(t) {
		t.Run(s.Name, func(t *testing.T) {
			leakCheck(t)
			toServer, toClient := s.bytes(t)
			replies := s.sent("server")
			var l *Listener
			ready := make(chan struct{})
			rec := &recorder{then: func(e Event) {
				<-ready
				if s.Server != "REP" && e.Kind == Message && len(replies) > 0 {
					if err := l.send(e.Conn, replies[0]); err != nil {
						t.Error(err)
					}
					replies = replies[1:]
				}
			}}
			l = s.listen(t, rec, func(r Request) [][]byte {
				rec.handle(Event{Kind: Message, Frames: r.Frames})
				return replies[0]
			})
			close(ready)

			tcp := dialRaw(t, l.Addr())
			if _, err := tcp.Write(toServer); err != nil {
				t.Fatal(err)
			}
			got := make([]byte, len(toClient))
			if n, err := io.ReadFull(tcp, got); err != nil {
				t.Fatalf("got %x, %v", got[:n], err)
			}
			if string(got) != string(toClient) {
				t.Fatalf("we sent\n%x\nlibzmq\n%x", got, toClient)
			}
			for i, want := range s.sent("client") {
				e := rec.kind(t, Message, i)
				if text(e.Frames) != text(want) {
					t.Errorf("message %d is %q, want %q", i, e.Frames, want)
				}
			}
			if s.Options.Identity != "" {
				if e := rec.kind(t, Connected, 0); e.Identity != s.Options.Identity {
					t.Errorf("identity %q", e.Identity)
				}
			}
			if err := tcp.CloseWrite(); err != nil {
				t.Fatal(err)
			}
			if rest, err := io.ReadAll(tcp); err != nil || len(rest) > 0 {
				t.Errorf("then came %x, %v", rest, err)
			}
			_ = l.Close()
		})
	}
}

// listen makes the server of a session; a REP takes respond, and all others the recorder.
func (s *session) listen(t *testing.T, rec *recorder, respond func(Request) [][]byte) *Listener {
	t.Helper()
	if s.Server == "REP" {
		r, err := ListenRep(testContext(t), "127.0.0.1:0", func(_ context.Context, r Request) [][]byte { return respond(r) }, s.options(false))
		if err != nil {
			t.Fatal(err)
		}
		return r.Listener
	}
	l, err := listen(testContext(t), socketType(s.Server), "127.0.0.1:0", rec.handle, s.options(false))
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// TestVectorsAsClient plays libzmq's server to our client.
func TestVectorsAsClient(t *testing.T) {
	for _, s := range loadVectors(t) {
		t.Run(s.Name, func(t *testing.T) {
			leakCheck(t)
			toServer, toClient := s.bytes(t)
			if s.Options.Ivl > 0 {
				toServer = toServer[:strings.Index(string(toServer), "PING")+len("PING\x00\x14")] // how many there are is a matter of time
			}
			ln, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = ln.Close() }()
			compared := make(chan error, 1)
			go func() {
				tcp, err := ln.Accept()
				if err != nil {
					compared <- err
					return
				}
				defer func() { _ = tcp.Close() }()
				compared <- replay(tcp, toServer, toClient)
				_, _ = io.Copy(io.Discard, tcp) // until the client closes
			}()

			hangUp, err := s.talk(t, ln.Addr().String())
			if s.Name == "push_dealer/incompatible_types" {
				if !errors.Is(err, ErrIncompatible) {
					t.Fatal(err)
				}
			} else if err != nil {
				t.Fatal(err)
			}
			if err := <-compared; err != nil {
				t.Fatal(err)
			}
			hangUp()
		})
	}
}

// replay sends what libzmq's server sent and compares what it gets.
func replay(tcp net.Conn, want, send []byte) error {
	if err := tcp.SetDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	if _, err := tcp.Write(send); err != nil {
		return err
	}
	got := make([]byte, len(want))
	if n, err := io.ReadFull(tcp, got); err != nil {
		return fmt.Errorf("got %x, %w", got[:n], err)
	}
	if string(got) != string(want) {
		return fmt.Errorf("we sent\n%x\nlibzmq\n%x", got, want)
	}
	return nil
}

// talk is our client of a session; hangUp closes it.
func (s *session) talk(t *testing.T, addr string) (hangUp func(), err error) {
	ctx := testContext(t)
	out, in := s.sent("client"), s.sent("server")
	if s.Client == "REQ" {
		r, err := DialReq(ctx, addr, s.options(true))
		if err != nil {
			return func() {}, err
		}
		body := func(f [][]byte) [][]byte { // the recorded ROUTER shows REQ's own empty frame
			if s.Server == "ROUTER" {
				return f[1:]
			}
			return f
		}
		got, err := r.Do(ctx, body(out[0])...)
		if err == nil && text(got) != text(body(in[0])) {
			t.Errorf("answer %q", got)
		}
		return func() { _ = r.Close() }, err
	}
	d, err := dial(ctx, socketType(s.Client), addr, nil, s.options(true))
	if err != nil {
		return func() {}, err
	}
	for _, m := range out {
		if err := d.Send(m...); err != nil {
			t.Error(err)
		}
	}
	for _, want := range in {
		if got, err := d.Recv(ctx); err != nil || text(got) != text(want) {
			t.Errorf("got %q, %v", got, err)
		}
	}
	return func() { _ = d.Close() }, nil
}
