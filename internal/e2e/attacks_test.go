package e2e

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"strconv"
	"sync"
	"time"

	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
	"github.com/berthkv/berth/internal/wire"
	"github.com/berthkv/berth/internal/zmtp"
)

// attack is one way to be a bad peer. A new one is a row here.
type attack struct {
	name string
	// holds is what the agent's limits let it take of the agent's memory, in
	// bytes: docs/proof.md says which.
	holds int64
	// run attacks until ctx ends. It calls w.begun once it is under way; an error
	// means that the attack itself is broken, not that it was fended off.
	run func(ctx context.Context, w *world) error
}

// What a connection may cost, by the port's limits: a goroutine's stack and the
// smallest buffers, or the largest.
const (
	bareConn = 32 << 10
	fullConn = 256 << 10
	recvAll  = 64 << 20  // zmtp's RecvTotal
	sendAll  = 128 << 20 // SendTotal
	decoded  = 16        // bytes that a byte of a message may become
	mailbox  = 2 * 32 << 20
)

var attacks = []attack{
	{"connections that say nothing, on every port", 4000 * bareConn, silent},
	{"more peers that say hello and nothing else than may connect", 4096 * bareConn, idlePeers},
	{"frames of 2^32 and 2^63 bytes, of half a header, of no sense", 64 * fullConn, hugeFrames},
	{"bytes one at a time, on every port", 400 * fullConn, loris},
	{"large messages that never end", recvAll + 100*fullConn, stuckMessages},
	{"garbage in messages, mutated real ones too", 8*fullConn + mailbox, garbage},
	{"large questions whose answers are never read", sendAll + mailbox*decoded/8 + recvAll, neverReads},
	{"requests begun and cancelled, as many as go", 8*fullConn + mailbox + kv.MaxEndings<<10, floodBegin},
	{"LMCache's AllocRequests and CancelNotifs, as many as go", 50*fullConn + mailbox + kv.MaxEndings<<10, floodAlloc},
	{"commits, endings and answers that are nobody's or another's", 8*fullConn + mailbox, lies},
	{"another's identity, incarnation and session", 64 * fullConn, identities},
	{"a whole recorded session, again and again", 64 * fullConn, replays},
	{"frames for slots that are another's, old, outside or half", 64 * fullConn, dataFrames},
	{"memory that changes while it is copied, and descriptors that are none, over shm", 64*fullConn + kv.MaxEndings<<10, shmLies},
	{"valid and invalid in turn, on one session after another", 64*fullConn + kv.MaxEndings<<10, flips},
	{"garbage and page lists that lie, on the init port", recvAll + 64*fullConn, initPort},
	{"garbage and half requests, on the HTTP port", 300 * fullConn, httpPort},
	{"garbage from a process of the same user, on the local API", 200 * fullConn, localGarbage},
}

// pace calls f at most that often a second, until ctx ends or f errs.
func pace(ctx context.Context, perSecond int, f func(i int) error) error {
	const tick = 5 * time.Millisecond
	t := time.NewTicker(tick)
	defer t.Stop()
	due := 0.0
	for i := 0; ; {
		for due += float64(perSecond) * tick.Seconds(); due >= 1; due-- {
			if err := f(i); err != nil {
				return err
			}
			i++
		}
		select {
		case <-t.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// ports are the TCP ports of the victim that peers may reach.
func (w *world) ports() []string {
	p := []string{w.v.addrs.Alloc, w.v.addrs.Init, w.v.addrs.HTTP}
	if s, err := w.hello("scout", kv.Incarnation{0: 0xee, 1: byte(w.n)}); err == nil {
		p = append(p, s.tcp)
		s.conn.Close()
	}
	return p
}

// knock opens a TCP connection, patiently: the victim may be busy refusing.
func knock(ctx context.Context, addr string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	var d net.Dialer
	return d.DialContext(ctx, "tcp", addr)
}

// conns are connections that an attack keeps.
type conns []net.Conn

func (c conns) close() {
	for _, nc := range c {
		nc.Close()
	}
}

// zmtpHello is all that a DEALER says before its first message.
func zmtpHello(identity string) []byte {
	b := make([]byte, 64)
	b[0], b[9], b[10], b[11] = 0xff, 0x7f, 3, 1
	copy(b[12:], "NULL")
	body := []byte("\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity")
	body = binary.BigEndian.AppendUint32(body, uint32(len(identity)))
	body = append(body, identity...)
	return append(append(b, 4, byte(len(body))), body...)
}

// session is an attacker's session, by hand.
type session struct {
	conn   *zmtp.Conn
	self   kv.Incarnation
	reply  *msg.HelloReply
	tcp    string
	seq    uint64
	secret kv.Secret
}

// hello opens a session as a sender that fits the victim.
func (w *world) hello(node string, self kv.Incarnation) (*session, error) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	var id [8]byte
	rand.Read(id[:])
	c, err := zmtp.DialDealer(ctx, w.v.addrs.Alloc, nil, zmtp.Options{Identity: fmt.Appendf(nil, "%s-%x", node, id)})
	if err != nil {
		return nil, err
	}
	s := &session{conn: c, self: self, secret: kv.Secret{7}, seq: 1}
	facts := layout
	if err := s.send(&msg.Hello{Seq: 1, Min: 1, Max: 1, Role: msg.RoleSender, Node: node, Incarnation: self, Secret: s.secret, Facts: &facts}); err != nil {
		c.Close()
		return nil, err
	}
	f, err := c.Recv(ctx)
	if err != nil {
		c.Close()
		return nil, err
	}
	m, err := wire.Decode(f[len(f)-1])
	reply, ok := m.(*msg.HelloReply)
	if err != nil || !ok {
		c.Close()
		return nil, fmt.Errorf("hello is answered with %T %+v, %v", m, m, err)
	}
	s.reply = reply
	for _, l := range reply.Links {
		if l.Name == "tcp" {
			s.tcp = l.Addr
		}
	}
	return s, nil
}

func (s *session) next() uint64 { s.seq++; return s.seq }

func (s *session) send(m msg.Message) error {
	b, err := wire.Append(nil, m)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	return s.conn.SendWait(ctx, nil, b)
}

// drain reads and forgets what comes.
func (s *session) drain(ctx context.Context) {
	for {
		if _, err := s.conn.Recv(ctx); err != nil {
			return
		}
	}
}

func silent(ctx context.Context, w *world) error {
	var all conns
	defer func() { all.close() }()
	for i, ports := 0, w.ports(); i < 1000; i++ {
		for _, p := range ports {
			nc, err := knock(ctx, p)
			if err != nil {
				return err
			}
			all = append(all, nc)
		}
	}
	for range 50 {
		if nc, err := net.Dial("unix", w.v.shm); err == nil {
			all = append(all, nc)
		}
	}
	w.begun()
	<-ctx.Done()
	return nil
}

func idlePeers(ctx context.Context, w *world) error {
	var all conns
	defer func() { all.close() }()
	for i := range 4500 {
		nc, err := knock(ctx, w.v.addrs.Alloc)
		if err != nil {
			return err
		}
		all = append(all, nc)
		h := zmtpHello(fmt.Sprint("idle-", i))
		h[11] = 0 // ZMTP 3.0 knows no PING: such a peer is never found out by its silence
		if _, err := nc.Write(h); err != nil {
			continue // refused
		}
	}
	w.begun()
	<-ctx.Done()
	return nil
}

func hugeFrames(ctx context.Context, w *world) error {
	w.begun()
	bodies := [][]byte{
		{2, 0, 0, 0, 1, 0, 0, 0, 0}, {2, 0x7f, 255, 255, 255, 255, 255, 255, 255}, {3, 255, 255, 255, 255, 255, 255, 255, 255},
		{2, 0, 0, 0, 0, 1, 1, 0, 1}, {6, 0, 0, 0, 0, 0, 1, 0, 0}, {2, 0, 0}, {0xf8, 1, 2}, bytes.Repeat([]byte{1, 0}, 70), {4, 5, 4, 'P', 'I', 'N', 'G'},
	}
	return pace(ctx, 300, func(i int) error {
		nc, err := knock(ctx, w.v.addrs.Alloc)
		if err != nil {
			return nil
		}
		defer nc.Close()
		h := zmtpHello(fmt.Sprint("huge-", i))
		switch i % 12 {
		case 0:
			h = bytes.Repeat([]byte{255}, 200)
		case 1:
			h = h[:64] // no READY: a message at once
		case 2:
			binary.BigEndian.PutUint32(h[len(h)-4-len(fmt.Sprint("huge-", i)):], math.MaxUint32)
		}
		nc.Write(append(h, bodies[i%len(bodies)]...))
		nc.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
		io.Copy(io.Discard, nc) // until it is closed, or not
		return nil
	})
}

func loris(ctx context.Context, w *world) error {
	type slow struct {
		nc   net.Conn
		text []byte
	}
	var all []slow
	defer func() {
		for _, s := range all {
			s.nc.Close()
		}
	}()
	ports := w.ports()
	for i := range 300 {
		addr := ports[i%len(ports)]
		text := zmtpHello(fmt.Sprint("slow-", i))
		switch {
		case addr == w.v.addrs.HTTP:
			text = []byte("GET /v1/status HTTP/1.1\r\nHost: x\r\nX-Slow: " + string(bytes.Repeat([]byte("a"), 1000)))
		case i%8 < 4 && len(ports) > 3 && addr == ports[3]:
			text = []byte("BTD1 and then the rest, but slowly")
		}
		nc, err := knock(ctx, addr)
		if err != nil {
			return err
		}
		all = append(all, slow{nc, text})
		if i%2 == 0 && addr == w.v.addrs.Alloc { // hello at once, then a message byte by byte
			nc.Write(text)
			all[len(all)-1].text = append([]byte{2, 0, 0, 0, 0, 0, 1, 0, 0}, make([]byte, 1000)...)
		}
	}
	w.begun()
	return pace(ctx, 1000, func(i int) error {
		if s := &all[i%len(all)]; len(s.text) > 0 {
			s.nc.SetWriteDeadline(time.Now().Add(time.Second))
			s.nc.Write(s.text[:1])
			s.text = s.text[1:]
		}
		return nil
	})
}

func stuckMessages(ctx context.Context, w *world) error {
	var all conns
	defer func() { all.close() }()
	part := make([]byte, 6<<20)
	for i := range 60 {
		nc, err := knock(ctx, w.v.addrs.Alloc)
		if err != nil {
			return err
		}
		all = append(all, nc)
		nc.SetWriteDeadline(time.Now().Add(2 * time.Second))
		nc.Write(append(zmtpHello(fmt.Sprint("stuck-", i)), 2, 0, 0, 0, 0, 0, 0xff, 0xff, 0))
		nc.Write(part) // the connection may be closed meanwhile
	}
	w.begun()
	<-ctx.Done()
	return nil
}

func garbage(ctx context.Context, w *world) error {
	s, err := w.hello("garbage", kv.Incarnation{0xa1})
	if err != nil {
		return err
	}
	defer s.conn.Close()
	go s.drain(ctx)
	raw, err := zmtp.DialDealer(ctx, w.v.addrs.Alloc, func(zmtp.Event) {}, zmtp.Options{Identity: []byte("garbage")})
	if err != nil {
		return err
	}
	defer raw.Close()
	w.begun()
	facts := layout
	samples := []msg.Message{&msg.Heartbeat{Seq: 5}, &msg.Begin{Seq: 6, Begin: 1 << 40, ReqID: "g", Link: "tcp", TotalChunks: 1 << 40}, allocRequest("g", 1<<40, keys("g", 0, 3), false),
		&msg.Hello{Seq: 7, Min: 1, Max: 9, Role: "emperor", Facts: &facts}, &msg.Cancel{Seq: 8, ReqID: "g", Text: string(make([]byte, 4000))}, &msg.ProxyNotif{ReqID: "g"}}
	return pace(ctx, 1000, func(i int) error {
		b, err := wire.Append(nil, samples[i%len(samples)])
		if err != nil {
			return err
		}
		var r [4]byte
		rand.Read(r[:])
		switch i % 4 {
		case 0:
			b = make([]byte, int(r[0])*16)
			rand.Read(b)
		case 1:
			b[int(r[0])%len(b)] ^= r[1] | 1
		case 2:
			b = b[:int(r[0])%len(b)]
		}
		raw.SendWait(ctx, nil, b)
		if i%2 == 1 {
			s.conn.SendWait(ctx, nil, b)
		}
		return nil
	})
}

func neverReads(ctx context.Context, w *world) error {
	many := make([]string, kv.MaxKeys)
	for i := range many {
		many[i] = strconv.Itoa(i)
	}
	m := allocRequest("n", 1<<30, many, false) // refused at once, with as many -1
	payload, err := wire.Append(nil, m)
	if err != nil {
		return err
	}
	frame := append([]byte{1, 0, 2}, binary.BigEndian.AppendUint64(nil, uint64(len(payload)))...)
	frame = append(frame, payload...)
	var all conns
	defer func() { all.close() }()
	open := func(i int) error {
		nc, err := knock(ctx, w.v.addrs.Alloc)
		if err != nil {
			return err
		}
		nc.(*net.TCPConn).SetReadBuffer(4 << 10)
		all = append(all, nc)
		_, err = nc.Write(zmtpHello(fmt.Sprintf("mute-%d-%d", i, len(all))))
		return err
	}
	for i := range 12 {
		if err := open(i); err != nil {
			return err
		}
	}
	w.begun()
	rate := 300
	if shadow > 1 { // the race detector makes the victim that much slower
		rate = 100
	}
	return pace(ctx, rate, func(i int) error {
		nc := all[len(all)-1-i%12]
		nc.SetWriteDeadline(time.Now().Add(200 * time.Millisecond))
		if _, err := nc.Write(frame); err != nil { // closed, or the victim reads no more
			open(i)
		}
		return nil
	})
}

func floodBegin(ctx context.Context, w *world) error {
	var all []*session
	for i := range 8 {
		s, err := w.hello(fmt.Sprint("flood-", i), kv.Incarnation{0xb1, byte(i)})
		if err != nil {
			return err
		}
		defer s.conn.Close()
		go s.drain(ctx)
		all = append(all, s)
	}
	w.begun()
	name := string(bytes.Repeat([]byte("x"), 480))
	return pace(ctx, 4000, func(i int) error {
		s := all[i%len(all)]
		n := uint64(i/len(all)) + 1
		req := fmt.Sprint(name, i)
		total := int64(1 + i%8)
		if i%16 == 15 {
			total = math.MaxInt64
		}
		s.send(&msg.Begin{Seq: s.next(), Begin: n, ReqID: req, Link: "tcp", TotalChunks: total})
		s.send(&msg.Cancel{Seq: s.next(), Begin: n, Reason: "cancelled", Text: name})
		return nil
	})
}

func floodAlloc(ctx context.Context, w *world) error {
	var all []*zmtp.Conn
	for i := range 40 {
		c, err := zmtp.DialDealer(ctx, w.v.addrs.Alloc, func(zmtp.Event) {}, zmtp.Options{Identity: fmt.Appendf(nil, "10.0.0.%d-to-x", i)})
		if err != nil {
			return err
		}
		defer c.Close()
		all = append(all, c)
	}
	w.begun()
	return pace(ctx, 2000, func(i int) error {
		c, req := all[i%len(all)], fmt.Sprint("flood-", i)
		total := int64(1 + i%4)
		if i%8 == 7 {
			total = 1 << 40
		}
		for _, m := range []msg.Message{allocRequest(req, total, keys(req, 0, 1), false), allocRequest(req, total, keys(req, 0, 9), true), &msg.CancelNotif{ReqID: req, Keys: keys(req, 0, 1)}} {
			b, err := wire.Append(nil, m)
			if err != nil {
				return err
			}
			c.SendWait(ctx, nil, b)
		}
		return nil
	})
}

func lies(ctx context.Context, w *world) error {
	s, err := w.hello("liar", kv.Incarnation{0xc1})
	if err != nil {
		return err
	}
	defer s.conn.Close()
	go s.drain(ctx)
	w.begun()
	return pace(ctx, 2000, func(i int) error {
		n := uint64(i%40 + 1)
		chunk := msg.Chunk{Index: int64(i % 70), Key: "k", Tokens: chunkTokens}
		honest := fmt.Sprint("honest-", 20+i%300)
		s.send([]msg.Message{
			&msg.Commit{Seq: s.next(), Begin: n, Chunks: []msg.Chunk{chunk}, Fmt: layout.Format, DType: layout.DType, Shape: shape},
			&msg.Commit{Seq: s.next(), Begin: n, HasEnd: true, End: int64(i % 9)},
			&msg.Drained{Re: n, Begin: n},
			&msg.Granted{Re: n, Begin: n, Generation: kv.Generation(n), Slots: []kv.SlotID{0, 1, 1 << 31}},
			&msg.CommitReply{Re: n, Begin: n, Complete: true},
			&msg.Ended{Re: n, Begin: n, Ending: msg.EndReady},
			&msg.Ended{Seq: s.next(), ReqID: honest, Ending: msg.EndFailed},
			&msg.HeartbeatReply{Re: math.MaxUint64},
			&msg.Cancel{Seq: s.next(), Begin: n},
			&msg.Ready{Seq: s.next(), ReqID: honest}, // a proxy's word
			&msg.Watch{Seq: s.next(), ReqID: honest},
			&msg.Begin{Seq: 1, Begin: n, ReqID: honest, Link: "no such", TotalChunks: 1},
			&msg.EndingNotice{ReqID: honest, Ending: msg.EndFailed},
			&msg.Error{Re: n, Code: "hello_required"},
		}[i%14])
		return nil
	})
}

func identities(ctx context.Context, w *world) error {
	var victim kv.Incarnation
	b, err := hex.DecodeString(w.client.Info().Incarnation)
	if err != nil {
		return err
	}
	copy(victim[:], b)
	host, err := os.Hostname()
	if err != nil {
		return err
	}
	w.begun()
	facts := layout
	return pace(ctx, 100, func(i int) error {
		// The identities that the honest sender's dialer makes: hosts are known.
		id := fmt.Sprintf("%s-sender/%s-to-127.0.0.1:%d#%d", host, victim.Short(), w.v.port, 1<<32+i%8)
		dctx, cancel := context.WithTimeout(ctx, 200*time.Millisecond)
		defer cancel()
		if i%2 == 0 {
			id = fmt.Sprint("thief-", i)
		}
		c, err := zmtp.DialDealer(dctx, w.v.addrs.Alloc, func(zmtp.Event) {}, zmtp.Options{Identity: []byte(id), Linger: time.Millisecond})
		if err != nil {
			return nil // taken
		}
		defer c.Close()
		h := &msg.Hello{Seq: uint64(1 + i%50), Min: 1, Max: 1, Role: msg.RoleSender, Node: "thief", Incarnation: victim, Secret: kv.Secret{byte(i)}, Facts: &facts,
			Resume: i%3 == 0}
		if h.Resume {
			h.Session = uint64(1 + i%7)
		}
		if i%5 == 0 {
			h.Seq = math.MaxInt64
		}
		for _, m := range []msg.Message{h, &msg.Cancel{Seq: 99, Begin: uint64(i % 100)}, &msg.Begin{Seq: 100, Begin: 1 << 40, ReqID: "theft", Link: "tcp", TotalChunks: 1}} {
			b, err := wire.Append(nil, m)
			if err != nil {
				return err
			}
			c.SendWait(dctx, nil, b)
		}
		return nil
	})
}

// replays records what a sender of the attacker's says in a whole session, and
// says it again, with the same identity and with others.
func replays(ctx context.Context, w *world) error {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	defer l.Close()
	var mu sync.Mutex
	var said []byte
	var relays sync.WaitGroup
	defer relays.Wait()
	defer l.Close()
	relays.Go(func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("tcp", w.v.addrs.Alloc)
			if err != nil {
				in.Close()
				continue
			}
			relays.Go(func() { io.Copy(in, out); in.Close() })
			relays.Go(func() {
				defer out.Close()
				b := make([]byte, 64<<10)
				for {
					n, err := in.Read(b)
					if err != nil {
						return
					}
					mu.Lock()
					said = append(said, b[:n]...)
					mu.Unlock()
					out.Write(b[:n])
				}
			})
		}
	})
	port := l.Addr().(*net.TCPAddr).Port
	sender, receiver, end, err := w.sender(ctx, "recorded")
	if err != nil {
		return err
	}
	defer end()
	if err := transfer(ctx, sender, receiver, "recorded-1", port); err != nil {
		return err
	}
	w.begun()
	err = pace(ctx, 100, func(i int) error {
		mu.Lock()
		b := bytes.Clone(said)
		mu.Unlock()
		if i%2 == 0 { // another identity of the same length
			if at := bytes.Index(b, []byte("Identity")); at > 0 {
				copy(b[at+12:], fmt.Sprintf("%04d", i%10_000))
			}
		}
		if i%3 == 0 {
			b = b[:len(b)/2+i%(len(b)/2)]
		}
		nc, err := knock(ctx, w.v.addrs.Alloc)
		if err != nil {
			return nil
		}
		defer nc.Close()
		nc.SetDeadline(time.Now().Add(20 * time.Millisecond))
		nc.Write(b)
		io.Copy(io.Discard, nc)
		return nil
	})
	if err != nil {
		return err
	}
	// The one that was recorded is unharmed.
	return transfer(context.WithoutCancel(ctx), sender, receiver, "recorded-2", port)
}

func dataFrames(ctx context.Context, w *world) error {
	s, err := w.hello("framer", kv.Incarnation{0xd1})
	if err != nil {
		return err
	}
	defer s.conn.Close()
	go s.drain(ctx)
	stop := context.AfterFunc(ctx, func() { s.conn.Close() })
	defer stop()
	// Its session must live, or the link refuses it.
	go pace(ctx, 4, func(int) error { return s.send(&msg.Heartbeat{Seq: s.next()}) })
	w.begun()
	chunk := make([]byte, slotBytes)
	rand.Read(chunk)
	return pace(ctx, 60, func(i int) error {
		nc, err := knock(ctx, s.tcp)
		if err != nil {
			return nil
		}
		defer nc.Close()
		nc.SetDeadline(time.Now().Add(100 * time.Millisecond))
		h := append([]byte("BTD1"), s.reply.Incarnation[:]...)
		owner, secret := s.self, s.secret
		switch i % 8 {
		case 0:
			secret[3]++
		case 1:
			owner[9]++
		case 2:
			h[4]++
		case 3:
			h[0] = 'X'
		}
		h = append(append(h, owner[:]...), secret[:]...)
		nc.Write(h)
		var answer [24]byte
		if _, err := io.ReadFull(nc, answer[:]); err != nil || answer[4] != 0 {
			return nil
		}
		for f := range 40 { // generations are small numbers, and every slot is tried
			b := binary.LittleEndian.AppendUint32(nil, uint32((i+f)%w.v.slots))
			b = binary.LittleEndian.AppendUint64(b, uint64((i*7+f)%2000))
			n := (i * f * 97) % slotBytes
			switch (i + f) % 40 {
			case 37:
				binary.LittleEndian.PutUint32(b, math.MaxUint32)
			case 38:
				n = 1 << 31
			}
			b = append(binary.LittleEndian.AppendUint32(b, uint32(n)), chunk[:min(n, 2000)]...)
			if n > 2000 && (i+f)%40 < 36 {
				b = append(b, chunk[2000:min(n, slotBytes)]...)
			}
			if _, err := nc.Write(b); err != nil {
				return nil
			}
		}
		return nil
	})
}

func flips(ctx context.Context, w *world) error {
	w.begun()
	n := 0
	return pace(ctx, 60, func(i int) error {
		n++
		s, err := w.hello("flip", kv.Incarnation{0xe1, byte(i), byte(i >> 8)})
		if err != nil {
			return nil
		}
		defer s.conn.Close()
		facts := layout
		for f := range uint64(8) {
			s.send(&msg.Begin{Seq: s.next(), Begin: f + 1, ReqID: fmt.Sprint("flip-", i, f), Link: []string{"tcp", "shm"}[f%2], TotalChunks: int64(f % 3)})
			s.conn.Send(nil, []byte{0xc1, 0, byte(f)})
			s.send(&msg.Heartbeat{Seq: s.next()})
			s.send(&msg.Commit{Seq: s.next(), Begin: f + 1, Chunks: []msg.Chunk{{Index: int64(f), Key: "k", Tokens: chunkTokens,
				Src: &msg.Source{Slot: kv.SlotID(1 << f << 20), Generation: 7}}}, Fmt: layout.Format, DType: layout.DType, Shape: shape})
			s.send(&msg.Hello{Seq: s.next(), Min: 1, Max: 1, Role: msg.RoleSender, Incarnation: s.self, Secret: s.secret, Facts: &facts})
			s.send(&msg.Cancel{Seq: s.next(), Begin: f + 1})
		}
		return nil
	})
}

func initPort(ctx context.Context, w *world) error {
	w.begun()
	list := append([]byte{0x80, 4, 0x95, 255, 255, 255, 255, 255, 255, 255, 127, 0x8c, 0x13}, "nixl_cu13._bindings\x94\x8c\x0dnixlXferDList\x94\x93\x94)\x81\x94B"...)
	list = append(list, 255, 255, 255, 127)
	list = append(list, "nixlSerDes|nixlDList\xff\xff\xff\xff\xff\xff\xff\xffnixlBDList|"...)
	meta, err := wire.AppendInit(nil, &wire.NixlInitRequest{LocalMeta: make([]byte, 1<<20)})
	if err != nil {
		return err
	}
	pages, err := wire.AppendInit(nil, &wire.NixlMemRegRequest{RemoteAgent: []byte("x"), LocalID: "evil", LocalPages: list})
	if err != nil {
		return err
	}
	bodies := [][]byte{meta, pages, []byte("\x81\xa4type\xb0NixlInitRequest?"), nil, bytes.Repeat([]byte{0x91}, 4000), []byte("\xdf\xff\xff\xff\xff")}
	return pace(ctx, 150, func(i int) error {
		dctx, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		c, err := zmtp.DialReq(dctx, w.v.addrs.Init, zmtp.Options{Linger: time.Millisecond})
		if err != nil {
			return nil
		}
		defer c.Close()
		answer, err := c.Do(dctx, bodies[i%len(bodies)])
		if err == nil && len(answer) == 0 {
			return fmt.Errorf("body %d has no answer", i%len(bodies))
		}
		return nil
	})
}

func httpPort(ctx context.Context, w *world) error {
	var all conns
	defer func() { all.close() }()
	for i := range 200 {
		nc, err := knock(ctx, w.v.addrs.HTTP)
		if err != nil {
			return err
		}
		all = append(all, nc)
		fmt.Fprintf(nc, "GET /metrics HTTP/1.1\r\nX-%d: ", i)
	}
	w.begun()
	texts := []string{"\x16\x03\x01\x02\x00\x01", "GET / HTTP/9.9\r\n\r\n", "POST /v1/status HTTP/1.1\r\nHost: x\r\nContent-Length: 9999999999\r\n\r\nx",
		"GET /v1/status?" + string(bytes.Repeat([]byte("a"), 100_000)) + " HTTP/1.1\r\n\r\n", "GET /metrics HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n"}
	return pace(ctx, 200, func(i int) error {
		nc, err := knock(ctx, w.v.addrs.HTTP)
		if err != nil {
			return nil
		}
		defer nc.Close()
		nc.SetDeadline(time.Now().Add(20 * time.Millisecond))
		io.WriteString(nc, texts[i%len(texts)])
		io.Copy(io.Discard, nc)
		return nil
	})
}

func localGarbage(ctx context.Context, w *world) error {
	var all conns
	defer func() { all.close() }()
	for range 60 { // half a frame each; the limit of connections is for trusted ones
		nc, err := net.Dial("unix", w.v.addrs.Local)
		if err != nil {
			return err
		}
		all = append(all, nc)
		nc.Write([]byte{0, 0xff, 0xff, 0xff, 1, 2, 3})
	}
	w.begun()
	frame := func(b string) []byte {
		return append(binary.BigEndian.AppendUint32(nil, uint32(len(b))), b...)
	}
	frames := [][]byte{{0, 0, 0, 0}, {255, 255, 255, 255}, frame("\x82\xa2id\x01\xa2op\xa5claim"), frame("\x81\xa2op\xa6status"), frame("\xc1"),
		bytes.Repeat(frame("\x82\xa2id\x01\xa2op\xa6status"), 50), frame("\x84\xa2id\x07\xa2op\xa5hello\xa7version\x01\xa4part\xa4tool")}
	return pace(ctx, 300, func(i int) error {
		nc, err := net.Dial("unix", w.v.addrs.Local)
		if err != nil {
			return nil
		}
		defer nc.Close()
		nc.SetDeadline(time.Now().Add(20 * time.Millisecond))
		nc.Write(frames[i%len(frames)])
		io.Copy(io.Discard, nc)
		return nil
	})
}
