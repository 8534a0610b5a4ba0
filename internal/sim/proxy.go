package sim

import (
	"context"
	"slices"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
	"github.com/berthkv/berth/internal/node"
	"github.com/berthkv/berth/internal/watch"
)

// proxy is a proxy's process: the real watcher, and what a proxy does around it.
type proxy struct {
	host
	watcher *node.Watcher
	r       stream
	watches map[*node.Watch]int
}

// watching is a request at its proxy.
type watching struct {
	watch  *node.Watch
	asked  int // life of the proxy's process that was asked, 0: not yet
	sent   bool
	result *watch.Result
	over   bool
}

func newProxy(w *world, n int) *proxy {
	p := &proxy{}
	p.host.init(w, "p", n)
	p.r = stream{w.random("proxy", p.name)}
	p.host.start, p.host.crash = p.boots, p.dies
	p.boot()
	return p
}

func (w *world) proxyOf(q *request) *proxy { return w.proxies[q.Sender%len(w.proxies)] }

func (p *proxy) boots() {
	lease := p.w.sc.Lease
	p.watches = map[*node.Watch]int{}
	p.watcher = node.NewWatcher(node.WatcherConfig{
		Watch:       watch.Config{Node: p.name, Incarnation: p.incarnation(), Secret: p.secret(), ConnectTimeout: lease, Idle: 4 * lease, Deadline: 40 * lease},
		DialTimeout: aYear, Dialer: dialer{&p.host}, Clock: p.clock, Drive: p.drive(&p.r, nil), Told: p.told,
	})
	p.turn, p.check = p.watcher.Turn, p.watcher.Check
}

// dies: nobody waits for its answers any more, and the prefill engines see its
// connections end.
func (p *proxy) dies() {
	p.watcher.Close()
	for _, id := range p.w.hosts[:len(p.w.receivers)] {
		if way := p.w.pairs[pairID{p.id, id.id}]; way != nil {
			for _, k := range slices.Clone(way.pipes) {
				k.died(false)
			}
		}
	}
	for _, i := range p.kept() {
		p.abort(i)
		p.over(i, "proxy lost")
	}
}

func (p *proxy) kept() []int {
	var out []int
	for _, i := range p.watches {
		out = append(out, i)
	}
	slices.Sort(out)
	return out
}

// ask is a client's request.
func (p *proxy) ask(i int) {
	q := &p.w.requests[i]
	if !p.up {
		p.over(i, "no proxy")
		return
	}
	q.asked = p.life
	if q.Leaves > 0 {
		p.w.after(q.Leaves, func() { p.leave(i) })
	}
	p.deliver(p.life, func() {
		if q.over {
			return
		}
		left := q.At + q.Deadline - kv.Duration(p.w.now)
		wt, err := p.watcher.Watch(context.Background(), q.name, []watch.Peer{{Host: "r", AllocPort: q.Receiver + 1}}, durationOf(max(left, 1)))
		if err != nil {
			p.over(i, "no proxy")
			return
		}
		q.watch = wt
		p.watches[wt] = i
	})
}

// told: a watch is accepted, or has its result.
func (p *proxy) told(wt *node.Watch) {
	i := p.watches[wt]
	q := &p.w.requests[i]
	accepted, result := wt.Have()
	if q.over {
		return
	}
	if accepted && !q.sent && result == nil {
		q.sent = true
		p.w.after(p.r.take(http), func() {
			if !q.over {
				p.w.senders[q.Sender].send(i)
			}
		})
	}
	if result == nil {
		return
	}
	if q.result != nil {
		p.w.violate("R5", "%s is told the result of %s twice", p.name, q.name)
	}
	q.result = result
	p.w.toldProxy(p, q, ending{result.Ending, result.Reason})
	switch {
	case result.Ending != msg.EndReady:
		p.w.after(0, func() {
			p.abort(i)
			p.close(i, "", string(result.Reason)+q.where(result.Reason))
		})
	case q.Unread:
		p.w.after(0, func() { p.close(i, "", "unread") })
	default:
		p.w.after(p.r.take(http), func() {
			if !q.over {
				p.w.receivers[q.Receiver].decode(i)
			}
		})
	}
}

// where says, of a deadline, what the request was waiting for.
func (q *request) where(why fault.Code) string {
	switch {
	case why != fault.Deadline:
	case q.state == queued:
		return " in the prefill engine's queue"
	case q.place == waiting || q.at.why == fault.Deadline && q.gen == 0:
		return " waiting for admission"
	case q.state == begun:
		return " being sent"
	}
	return ""
}

// close ends the watch, with a cancel when there is a reason, and the request.
func (p *proxy) close(i int, code fault.Code, outcome string) {
	q := &p.w.requests[i]
	if q.over {
		return
	}
	p.over(i, outcome)
	if q.watch == nil {
		return
	}
	p.deliver(q.asked, func() {
		delete(p.watches, q.watch)
		if code == "" {
			q.watch.Release()
		} else {
			q.watch.Cancel(code, outcome)
		}
	})
}

// abort tells the prefill engine that nobody wants the prompt.
func (p *proxy) abort(i int) {
	q := &p.w.requests[i]
	if q.sent {
		p.w.after(p.r.take(http), func() { p.w.senders[q.Sender].abort(i) })
	}
}

// leave: the client is gone.
func (p *proxy) leave(i int) {
	q := &p.w.requests[i]
	if q.over {
		return
	}
	q.left = true
	p.abort(i)
	p.close(i, fault.Cancelled, "client left")
}

// prefillFailed is the prefill engine's answer when it is none.
func (p *proxy) prefillFailed(i int, e ending) {
	q := &p.w.requests[i]
	if q.over || q.result != nil {
		return
	}
	why := e.why
	if why == "" {
		why = fault.Internal
	}
	p.close(i, why, "prefill: "+string(why))
}

// decoded is the decode engine's word that it has read a request, or why not.
func (p *proxy) decoded(i int, text string) { p.close(i, "", text) }

func (p *proxy) over(i int, outcome string) {
	q := &p.w.requests[i]
	if q.over {
		return
	}
	q.over = true
	p.w.isOver(q, outcome)
}
