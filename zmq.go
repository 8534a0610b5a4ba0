package berth

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"strconv"
	"sync"
	"time"

	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/link/nixllink"
	"github.com/berthkv/berth/internal/node"
	"github.com/berthkv/berth/internal/wire"
	"github.com/berthkv/berth/internal/zmtp"
)

// The ZeroMQ sockets as the shells want them: one payload a message, the last
// frame of it (PROTOCOL.md section 1).

// payload is the last frame of a message; there is always one.
func payload(frames [][]byte) []byte { return frames[len(frames)-1] }

// router is the alloc port.
type router struct{ router *zmtp.Router }

func listenRouter(ctx context.Context, addr string, ev node.RouterEvents, o zmtp.Options) (*router, error) {
	r, err := zmtp.ListenRouter(ctx, addr, func(e zmtp.Event) {
		conn := kv.ConnID(e.Conn)
		switch e.Kind {
		case zmtp.Connected:
			ev.Connected(conn, e.Identity, e.Remote.String())
		case zmtp.Message:
			ev.Message(conn, payload(e.Frames))
		case zmtp.Disconnected:
			ev.Disconnected(conn)
		}
	}, o)
	return &router{r}, err
}

func (r *router) Send(conn kv.ConnID, b []byte) error {
	return r.router.Send(zmtp.ConnID(conn), nil, b)
}
func (r *router) CloseConn(conn kv.ConnID) { r.router.CloseConn(zmtp.ConnID(conn)) }
func (r *router) Close() error             { return r.router.Close() }

// maxInit bounds a message of the init port: a page list and what goes with it.
const maxInit = wire.MaxPageList + wire.MaxMeta

// initConns is how many connections an init port has: each LMCache sender's is
// over when its handshake is.
const initConns = 256

func listenInit(ctx context.Context, addr string, respond func([]byte) []byte, o zmtp.Options) (*zmtp.Rep, error) {
	// A Berth sender's stays open in silence: its end says that this receiver is gone.
	o.MaxFrame, o.MaxMessage, o.MaxConns, o.KeepIdle = maxInit, maxInit, initConns, true
	return zmtp.ListenRep(ctx, addr, func(_ context.Context, r zmtp.Request) [][]byte {
		var b []byte
		if len(r.Frames) > 0 {
			b = payload(r.Frames)
		}
		return [][]byte{respond(b)}
	}, o)
}

// initPort is a connection to an LMCache receiver's init port.
type initPort struct{ *zmtp.Req }

func dialInit(ctx context.Context, addr string) (nixllink.InitPort, error) {
	r, err := zmtp.DialReq(ctx, addr, zmtp.Options{MaxFrame: maxInit, MaxMessage: maxInit})
	if err != nil {
		return nil, err
	}
	return initPort{r}, nil
}

func (p initPort) Init(ctx context.Context, metadata []byte) (self, theirs []byte, err error) {
	r, err := askInit[*wire.NixlInitResponse](ctx, p, &wire.NixlInitRequest{LocalMeta: metadata})
	if err != nil {
		return nil, nil, err
	}
	return r.RemoteAgent, r.RemoteMeta, nil
}

func (p initPort) Register(ctx context.Context, self []byte, localID string, pages []byte) ([]byte, error) {
	r, err := askInit[*wire.NixlMemRegResponse](ctx, p, &wire.NixlMemRegRequest{RemoteAgent: self, LocalID: localID, LocalPages: pages})
	if err != nil {
		return nil, err
	}
	return r.RemotePages, nil
}

// askInit sends one message and returns the answer, if it is of that type.
func askInit[T wire.InitMessage](ctx context.Context, p initPort, m wire.InitMessage) (answer T, err error) {
	b, err := wire.AppendInit(nil, m)
	if err != nil {
		return answer, err
	}
	frames, err := p.Do(ctx, b)
	if err != nil {
		return answer, err
	}
	a, err := wire.DecodeInit(payload(frames), kv.MaxSlots)
	if err != nil {
		return answer, err
	}
	if refused, ok := a.(*wire.BerthRefused); ok {
		return answer, fmt.Errorf("refused: %s", refused.Text)
	}
	answer, ok := a.(T)
	if !ok {
		return answer, fmt.Errorf("%T is answered with %T", m, a)
	}
	return answer, nil
}

// dialer makes DEALER connections with an identity of their own each.
type dialer struct {
	name string
	inc  kv.Incarnation
	log  *slog.Logger

	wg   sync.WaitGroup // open connections
	mu   sync.Mutex
	open map[*zmtp.Conn]struct{}
}

func newDialer(name string, inc kv.Incarnation, log *slog.Logger) *dialer {
	return &dialer{name: name, inc: inc, log: log, open: map[*zmtp.Conn]struct{}{}}
}

// identity is unique for each connection: a ROUTER with libzmq's defaults keeps
// a reused identity mute, also after the first connection has closed.
func (d *dialer) identity(addr string, n uint64) []byte {
	tail := fmt.Sprintf("/%s-to-%s#%d", d.inc.Short(), addr, n)
	const longest = 255
	return append([]byte(d.name)[:min(len(d.name), max(longest-len(tail), 0))], tail...)
}

func (d *dialer) Dial(ctx context.Context, host string, port int, n uint64, ev node.DialEvents) (node.ControlConn, error) {
	addr := net.JoinHostPort(host, strconv.Itoa(port))
	c, err := zmtp.DialDealer(ctx, addr, func(e zmtp.Event) {
		switch e.Kind {
		case zmtp.Message:
			ev.Message(payload(e.Frames))
		case zmtp.Disconnected:
			ev.Closed(e.Err)
		}
	}, zmtp.Options{Identity: d.identity(addr, n), Log: d.log})
	if err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.open[c] = struct{}{}
	d.wg.Go(func() {
		<-c.Done()
		d.mu.Lock()
		defer d.mu.Unlock()
		delete(d.open, c)
	})
	return dealer{c}, nil
}

// Close closes every connection and waits. No Dial may be under way.
func (d *dialer) Close() error {
	d.mu.Lock()
	for c := range d.open {
		go c.Close()
	}
	d.mu.Unlock()
	d.wg.Wait()
	return nil
}

// dealer is a dialled connection.
type dealer struct{ conn *zmtp.Conn }

func (d dealer) Send(b []byte) error { return d.conn.Send(nil, b) }

// Close does not wait; the dialer's Close does.
func (d dealer) Close() { go d.conn.Close() }

// pusher tells the proxy. Words wait here while the proxy is not connected, so
// that a proxy that has just come hears of what it has just asked for.
type pusher struct {
	push  *zmtp.Push
	queue chan []byte
	stop  context.CancelFunc
	done  chan struct{}
	log   *slog.Logger
}

const (
	notifyQueue   = 4096             // words that wait for the proxy
	notifyTimeout = 30 * time.Second // each at most so long
)

func newPusher(addr string, log *slog.Logger) (*pusher, error) {
	push, err := zmtp.NewPush(nil, zmtp.Options{Log: log})
	if err != nil {
		return nil, err
	}
	if err := push.Connect(addr); err != nil {
		push.Close()
		return nil, err
	}
	ctx, stop := context.WithCancel(context.Background())
	p := &pusher{push: push, queue: make(chan []byte, notifyQueue), stop: stop, done: make(chan struct{}), log: log}
	go p.run(ctx)
	return p, nil
}

func (p *pusher) run(ctx context.Context) {
	defer close(p.done)
	for {
		select {
		case <-ctx.Done():
			return
		case b := <-p.queue:
			c, cancel := context.WithTimeout(ctx, notifyTimeout)
			if err := p.push.SendWait(c, b); err != nil {
				p.log.Warn("proxy not told", "err", err)
			}
			cancel()
		}
	}
}

// Push queues a copy.
func (p *pusher) Push(b []byte) error {
	select {
	case p.queue <- append([]byte(nil), b...):
		return nil
	default:
		return fmt.Errorf("%d words wait for the proxy, at most %d", len(p.queue), notifyQueue)
	}
}

func (p *pusher) Close() error {
	p.stop()
	<-p.done
	return p.push.Close()
}
