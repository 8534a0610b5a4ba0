package nixllink

import (
	"fmt"
	"runtime"
	"sync"
	"time"
)

// owner is the one goroutine that calls an agent, locked to its thread. It runs
// what it is given and, while writes are posted, polls them: the library has no
// other word for their end.
type owner struct {
	agent agent
	wake  chan struct{}
	done  chan struct{}

	mu   sync.Mutex
	mail []func()
	stop bool

	// of the goroutine
	posted []*transfer
	remote map[string]int // remote agents known, and how many links use each
}

// transfer is a write that was posted.
type transfer struct {
	req  request
	conn *conn
	done func(err error)
}

// startOwner makes an agent of that name with the pool registered.
func startOwner(lib library, name string, backends []string, pool []byte) (*owner, error) {
	o := &owner{wake: make(chan struct{}, 1), done: make(chan struct{}), remote: map[string]int{}}
	made := make(chan error)
	go func() {
		runtime.LockOSThread() // not unlocked: the thread ends with the goroutine
		defer close(o.done)
		a, err := lib.newAgent(name, backends, pool)
		o.agent = a
		made <- err
		if err == nil {
			o.run()
			a.close()
		}
	}()
	if err := <-made; err != nil {
		<-o.done
		return nil, err
	}
	return o, nil
}

// give has f run by the owner, in order; false when it has ended.
func (o *owner) give(f func()) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.stop {
		return false
	}
	o.mail = append(o.mail, f)
	select {
	case o.wake <- struct{}{}:
	default:
	}
	return true
}

// call is give that waits until f has run; false when it has not, since the
// library does not return from another call.
func (o *owner) call(f func()) bool {
	ran := make(chan struct{})
	if !o.give(func() { f(); close(ran) }) {
		return false
	}
	return within(ran)
}

func within(done <-chan struct{}) bool {
	t := time.NewTimer(callTimeout)
	defer t.Stop()
	select {
	case <-done:
		return true
	case <-t.C:
		return false
	}
}

// close ends the owner. Its conns are closed.
func (o *owner) close() error {
	o.mu.Lock()
	o.stop = true
	o.mu.Unlock()
	select {
	case o.wake <- struct{}{}:
	default:
	}
	if !within(o.done) {
		return errUnresponsive
	}
	return nil
}

// callTimeout bounds the waits for the library: its calls return within
// milliseconds, or it hangs.
const callTimeout = 20 * time.Second

var errUnresponsive = fmt.Errorf("NIXL has not returned from a call for %v", callTimeout)

// Pauses between polls, doubled from the first to the last while no write ends.
const (
	firstPause = 20 * time.Microsecond
	lastPause  = time.Millisecond
	spins      = 32 // polls before the first pause
)

func (o *owner) run() {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	idle := 0
	for {
		o.mu.Lock()
		mail, stop := o.mail, o.stop
		o.mail = nil
		o.mu.Unlock()
		for _, f := range mail {
			f()
		}
		if stop && len(mail) == 0 {
			return
		}
		if o.poll() || len(mail) > 0 {
			idle = 0
			continue
		}
		if len(o.posted) == 0 {
			<-o.wake
			continue
		}
		if idle++; idle <= spins {
			runtime.Gosched()
			continue
		}
		timer.Reset(min(firstPause<<min(idle-spins, 10), lastPause))
		select {
		case <-o.wake:
		case <-timer.C:
		}
	}
}

// poll asks after every posted write and reports whether one has ended.
func (o *owner) poll() bool {
	left := o.posted[:0]
	var ended []*transfer
	var errs []error
	for _, t := range o.posted {
		done, err := o.agent.poll(t.req)
		if !done && err == nil {
			left = append(left, t)
			continue
		}
		o.agent.release(t.req)
		ended, errs = append(ended, t), append(errs, err)
	}
	clear(o.posted[len(left):])
	o.posted = left
	for i, t := range ended { // they may post more
		t.done(errs[i])
	}
	return len(ended) > 0
}

// load makes a receiver's agent known.
func (o *owner) load(metadata []byte) (name string, err error) {
	want, err := agentName(metadata)
	if err != nil {
		return "", err
	}
	if o.remote[want] == 0 {
		if name, err = o.agent.load(metadata); err != nil {
			return "", err
		}
		if name != want {
			o.agent.forget(name)
			return "", fmt.Errorf("the agent %q calls itself %q", want, name)
		}
	}
	o.remote[want]++
	return want, nil
}

// drop takes a link's writes back and disconnects from its receiver. After it
// nothing reads the staging pool for that link: the endpoint was closed.
func (o *owner) drop(c *conn, err error) {
	left := o.posted[:0]
	var dropped []*transfer
	for _, t := range o.posted {
		if t.conn == c {
			o.agent.release(t.req)
			dropped = append(dropped, t)
		} else {
			left = append(left, t)
		}
	}
	clear(o.posted[len(left):])
	o.posted = left
	o.unload(c.remote)
	for _, t := range dropped {
		t.done(err)
	}
}

// unload forgets a remote agent that no link uses any more.
func (o *owner) unload(name string) {
	if o.remote[name]--; o.remote[name] == 0 {
		delete(o.remote, name)
		o.agent.forget(name)
	}
}
