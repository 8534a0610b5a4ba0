//go:build !nixl

package nixllink

import (
	"fmt"
	"sync"
	"testing"

	"github.com/berthkv/berth/internal/link/linktest"
)

// processes: the library's stand-in writes within one process only.
const processes = false

func testLibrary(testing.TB) *Library { return &Library{&fake{agents: map[string]*fakeAgent{}}} }

func newLibrary() func(testing.TB) *Library {
	l := testLibrary(nil)
	return func(testing.TB) *Library { return l }
}

func TestMain(m *testing.M) { linktest.Main(m, harness()) }

// fake stands for the library: its agents write into each other's pools, each
// write some polls after it was posted.
type fake struct {
	mu     sync.Mutex
	agents map[string]*fakeAgent
}

func (f *fake) flavour() string { return "nixl_cu13._bindings" }

func (f *fake) newAgent(name string, _ []string, pool []byte) (agent, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.agents[name] != nil {
		return nil, fmt.Errorf("agent %q exists", name)
	}
	a := &fakeAgent{f: f, name: name, pool: pool, known: map[string]bool{}}
	f.agents[name] = a
	return a, nil
}

type fakeAgent struct {
	f     *fake
	name  string
	pool  []byte
	known map[string]bool
	live  int // requests
}

type fakeRequest struct {
	polls    int
	to       string
	dst, src []byte
}

func (a *fakeAgent) metadata() ([]byte, error) {
	return append(appendField([]byte(serialStart), "Agent", []byte(a.name)), "Conns"...), nil
}

func (a *fakeAgent) load(m []byte) (string, error) {
	name, err := agentName(m)
	if a.known[name] {
		return "", fmt.Errorf("%q is known", name)
	}
	a.known[name] = true
	return name, err
}

func (a *fakeAgent) forget(name string) { delete(a.known, name) }

func (a *fakeAgent) post(remote string, to remoteMemory, src uintptr, n int64) (request, error) {
	if !a.known[remote] {
		return nil, fmt.Errorf("%q is not known", remote)
	}
	a.f.mu.Lock()
	defer a.f.mu.Unlock()
	r := a.f.agents[remote]
	if r == nil {
		return nil, fmt.Errorf("%q is gone", remote)
	}
	a.live++
	within := func(pool []byte, at uintptr) []byte { off := at - address(pool); return pool[off : off+uintptr(n)] }
	return &fakeRequest{3, remote, within(r.pool, uintptr(to.addr)), within(a.pool, src)}, nil
}

func (a *fakeAgent) poll(r request) (bool, error) {
	q := r.(*fakeRequest)
	if q.polls--; q.polls > 0 {
		return false, nil
	}
	a.f.mu.Lock()
	defer a.f.mu.Unlock()
	if a.f.agents[q.to] == nil {
		return false, fmt.Errorf("%q is gone", q.to)
	}
	copy(q.dst, q.src)
	return true, nil
}

func (a *fakeAgent) release(request) { a.live-- }

func (a *fakeAgent) close() {
	a.f.mu.Lock()
	defer a.f.mu.Unlock()
	if a.live != 0 || len(a.known) != 0 {
		panic(fmt.Sprintf("%q is closed with %d requests and %d peers", a.name, a.live, len(a.known)))
	}
	delete(a.f.agents, a.name)
}
