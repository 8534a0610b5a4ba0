package shmlink

import (
	"crypto/subtle"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/link"
	"github.com/berthkv/berth/internal/link/gate"
	"github.com/berthkv/berth/internal/link/lobby"
)

// maxCopiers is where more threads stop copying faster on common machines.
const maxCopiers = 4

// maxPath is what fits into a unix address.
const maxPath = 107

// ReceiverConfig is what a receiver needs.
type ReceiverConfig struct {
	Incarnation kv.Incarnation // ours
	Pool        link.Pool      // the receive pool
	// Path is where senders connect: a path of at most 107 bytes, or @name for
	// one that is not in the file system.
	Path     string
	Checksum bool // compute Landing.Sum
	Copiers  int  // copying threads; 0: as many as there are processors, at most 4
}

// Receiver implements link.Receiver.
type Receiver struct {
	cfg   ReceiverConfig
	ev    link.ReceiverEvents
	gate  *gate.Gate
	lobby *lobby.Lobby
	wg    sync.WaitGroup // copiers
	close sync.Once

	mu      sync.Mutex
	closed  bool
	work    sync.Cond // for copiers: a job came, the end
	owners  map[kv.Incarnation]*owner
	pending map[kv.SlotID]job // what no copier has taken yet, revoked or not
	order   []kv.SlotID       // the keys of pending, oldest first
	mapped  int64             // bytes of all mappings
}

// owner is a sender that may connect.
type owner struct {
	secret kv.Secret
	peer   *peer // nil while it is not connected
}

// peer is a connected sender. Fields after m are guarded by Receiver.mu.
type peer struct {
	owner kv.Incarnation
	nc    net.Conn
	m     *mapping
	users int  // copiers in the mapping
	gone  bool // unmapped when the last user leaves
	fault error
}

// NewReceiver listens and serves. A path that another receiver serves is an
// error that names it; one that a dead receiver left behind is taken over.
func NewReceiver(cfg ReceiverConfig, ev link.ReceiverEvents) (*Receiver, error) {
	if cfg.Copiers == 0 {
		cfg.Copiers = min(runtime.GOMAXPROCS(0), maxCopiers)
	}
	l, err := listen(cfg.Path)
	if err != nil {
		return nil, err
	}
	r := &Receiver{cfg: cfg, ev: ev, gate: gate.New(cfg.Pool.Slots()), owners: make(map[kv.Incarnation]*owner), pending: make(map[kv.SlotID]job)}
	r.work.L = &r.mu
	r.wg.Add(cfg.Copiers)
	for range cfg.Copiers {
		go (&copier{r: r}).run()
	}
	r.mu.Lock() // until lobby is set
	defer r.mu.Unlock()
	r.lobby = lobby.Open(l, lobby.Config{Serve: r.serve})
	return r, nil
}

func listen(path string) (net.Listener, error) {
	if path == "" || len(path) > maxPath {
		return nil, fmt.Errorf("shm link: the path %q has %d bytes, 1 to %d are possible", path, len(path), maxPath)
	}
	l, err := net.Listen("unix", path)
	if errors.Is(err, unix.EADDRINUSE) && !strings.HasPrefix(path, "@") {
		if nc, e := net.DialTimeout("unix", path, time.Second); e == nil {
			nc.Close()
		} else if st, _ := os.Lstat(path); errors.Is(e, unix.ECONNREFUSED) && st != nil && st.Mode().Type() == os.ModeSocket && os.Remove(path) == nil {
			l, err = net.Listen("unix", path)
		}
	}
	if err == nil && !strings.HasPrefix(path, "@") {
		if err = os.Chmod(path, 0o600); err != nil {
			l.Close()
		}
	}
	if err != nil {
		return nil, fmt.Errorf("shm link cannot listen on %q: %w", path, err)
	}
	return l, nil
}

// Caps implements link.Receiver.
func (r *Receiver) Caps() link.Caps { return caps }

var caps = link.Caps{Mode: link.Pull, ExactFence: true}

// Offer implements link.Receiver.
func (r *Receiver) Offer() string { return r.cfg.Path }

// Mapped returns the bytes of the senders' memory that are mapped here. They
// count in the process's resident size as they are read.
func (r *Receiver) Mapped() int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.mapped
}

// Allow implements link.Receiver.
func (r *Receiver) Allow(id kv.Incarnation, secret kv.Secret) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if o := r.owners[id]; o != nil {
		o.secret = secret
		return
	}
	r.owners[id] = &owner{secret: secret}
}

// Disallow implements link.Receiver.
func (r *Receiver) Disallow(id kv.Incarnation) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if o := r.owners[id]; o != nil {
		delete(r.owners, id)
		r.dropLocked(o)
	}
}

// Open implements link.Receiver.
func (r *Receiver) Open(id kv.Incarnation, gen kv.Generation, slots []kv.SlotID) {
	r.gate.Open(id, gen, slots)
}

// Revoke implements link.Receiver. A slot that is being copied is fenced when
// that copy is done, which is soon.
func (r *Receiver) Revoke(gen kv.Generation, slots []kv.SlotID) {
	r.mu.Lock()
	for _, s := range slots {
		if j, ok := r.pending[s]; ok && j.gen == gen {
			j.revoked = true
			r.pending[s] = j // its place in the order stays taken
		}
	}
	r.mu.Unlock()
	if fenced := r.gate.Revoke(gen, slots); len(fenced) > 0 {
		r.ev.Fenced(gen, fenced)
	}
}

// Close implements link.Receiver.
func (r *Receiver) Close() error {
	r.close.Do(func() {
		r.lobby.Shut()
		r.mu.Lock()
		r.closed = true // nobody registers, no copier takes a job
		for _, o := range r.owners {
			r.dropLocked(o)
		}
		r.work.Broadcast()
		r.mu.Unlock()
		r.wg.Wait() // copies under way are finished, mappings are gone
		r.lobby.Wait()
	})
	return nil
}

// serve handshakes and then waits for the end of the connection.
func (r *Receiver) serve(nc net.Conn) {
	h, fds, err := readHello(nc.(*net.UnixConn))
	defer closeAll(fds)
	if err != nil {
		return // not our protocol: an answer would mean nothing to it
	}
	p, st := r.register(h, fds, nc)
	_, err = nc.Write(answer{st, r.cfg.Incarnation}.append(nil))
	if st != statusOK {
		return
	}
	if err == nil {
		err = r.lobby.Admit(nc)
	}
	if err == nil {
		var b [1]byte
		if _, err = nc.Read(b[:]); err == nil {
			err = errors.New("unexpected data from the sender")
		}
	}
	r.unregister(p, err)
}

// readHello reads a hello and the descriptors that came with it. The caller
// closes them, whatever the error is.
func readHello(nc *net.UnixConn) (h hello, fds []int, err error) {
	var b [helloBytes]byte
	oob := make([]byte, unix.CmsgSpace(4*descriptors))
	for n := 0; n < len(b); {
		m, oobn, flags, _, err := nc.ReadMsgUnix(b[n:], oob)
		got, rerr := parseRights(oob[:oobn])
		fds = append(fds, got...)
		switch {
		case err != nil:
			return h, fds, err
		case rerr != nil:
			return h, fds, rerr
		case m == 0:
			return h, fds, io.ErrUnexpectedEOF
		case flags&unix.MSG_CTRUNC != 0 || len(fds) > descriptors:
			return h, fds, fmt.Errorf("more than %d descriptors", descriptors)
		}
		n += m
	}
	h, ok := parseHello(&b)
	if !ok {
		return h, fds, errors.New("not a hello")
	}
	return h, fds, nil
}

func closeAll(fds []int) {
	for _, fd := range fds {
		unix.Close(fd)
	}
}

// register checks a hello, maps what came with it and makes it the owner's
// connection, in place of an older one.
func (r *Receiver) register(h hello, fds []int, nc net.Conn) (*peer, status) {
	if st := r.check(h); st != statusOK {
		return nil, st
	}
	if len(fds) != descriptors {
		return nil, statusMemory
	}
	m, err := mapSender(fds[0], fds[1], int64(h.slots), int64(h.slotBytes))
	if err != nil {
		return nil, statusMemory
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	o := r.owners[h.owner]
	if o == nil || r.closed { // changed meanwhile
		m.close()
		return nil, statusRefused
	}
	r.dropLocked(o)
	o.peer = &peer{owner: h.owner, nc: nc, m: m}
	r.mapped += m.bytes()
	return o.peer, statusOK
}

func (r *Receiver) check(h hello) status {
	r.mu.Lock()
	defer r.mu.Unlock()
	if h.receiver != r.cfg.Incarnation {
		return statusOtherReceiver
	}
	o := r.owners[h.owner]
	var secret kv.Secret // compared also when there is no owner: equal time
	if o != nil {
		secret = o.secret
	}
	same := subtle.ConstantTimeCompare(secret[:], h.secret[:]) == 1
	switch {
	case o == nil || !same:
		return statusRefused
	case h.slotBytes != uint64(r.cfg.Pool.SlotBytes) || h.slots < 1 || h.slots > kv.MaxSlots:
		return statusLayout
	}
	return statusOK
}

// unregister ends a peer whose connection has ended with err.
func (r *Receiver) unregister(p *peer, err error) {
	r.mu.Lock()
	o := r.owners[p.owner]
	current := o != nil && o.peer == p
	if current {
		r.dropLocked(o)
	}
	if p.fault != nil {
		err = p.fault
	}
	closed := r.closed
	r.mu.Unlock()
	if current && !closed {
		r.ev.Lost(p.owner, fmt.Errorf("shm link from %s: %w", p.owner.Short(), err))
	}
}

// dropLocked parts an owner from its connection; the mapping goes as soon as
// no copier is in it.
func (r *Receiver) dropLocked(o *owner) {
	p := o.peer
	if p == nil {
		return
	}
	o.peer = nil
	p.nc.Close()
	p.gone = true
	r.releaseLocked(p)
}

// releaseLocked unmaps a peer that is gone and has no users.
func (r *Receiver) releaseLocked(p *peer) {
	if p.gone && p.users == 0 && p.m != nil {
		r.mapped -= p.m.bytes()
		p.m.close()
		p.m = nil
	}
}
