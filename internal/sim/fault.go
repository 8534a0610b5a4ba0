package sim

import (
	"slices"

	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/localapi"
)

// fault lets the faults come, each at its time.
func (w *world) fault(i int) {
	if i == len(w.sc.Faults) {
		return
	}
	f := w.sc.Faults[i]
	w.at(kv.Instant(f.At), func() {
		w.strike(f)
		w.fault(i + 1)
	})
	w.last = max(w.last, kv.Instant(f.At+f.For))
}

// strike lets a fault happen, and schedules its end.
func (w *world) strike(f Fault) {
	h := w.host(f.Host)
	if h == nil || f.Kind.pair() != (f.Peer != "") || f.Peer != "" && w.host(f.Peer) == nil {
		return // of nodes that are not in this world
	}
	w.report.struck(f.Kind)
	w.hash.add(uint64(f.At))
	if w.tracing() {
		w.say("FAULT %s of %s %s, for %.3f s", f.Kind, f.Host, f.Peer, f.For.Seconds())
	}
	h.verify()
	if f.Peer != "" {
		w.host(f.Peer).verify()
	}
	over := func(do func()) {
		w.begun++
		w.after(f.For, func() {
			w.begun--
			do()
		})
	}
	if f.Peer != "" {
		w.between(f, h, w.receivers[w.host(f.Peer).id], over)
		return
	}
	w.toHost(f, h, over)
}

// between is a fault of the way between two nodes.
func (w *world) between(f Fault, h *host, r *receiver, over func(func())) {
	p := w.pair(h, r)
	var s *sender
	if f.Host[0] == 's' {
		s = w.senders[h.id-len(w.receivers)]
	}
	switch f.Kind {
	case Break:
		for _, k := range slices.Clone(p.pipes) {
			k.cut()
		}
	case OneWay:
		for _, k := range p.pipes {
			d := &k.toR
			if k.r.IntN(2) == 0 {
				d = &k.toS
			}
			d.silent, d.limit = true, min(d.limit, d.got)
			k.lose(w.sc.Lease/4 + f.For)
		}
	case Twice:
		p.twice++
		over(func() { p.twice-- })
	case Delay:
		p.slow++
		over(func() { p.slow-- })
	case Partition:
		p.blocked++
		over(func() {
			if p.blocked--; p.blocked == 0 {
				for _, k := range p.pipes {
					k.flow()
				}
				r.kick()
			}
		})
	case CutData:
		if s != nil && r.up {
			r.net.Cut(s.inc, r.inc)
			r.poke()
		}
	case LoseLink:
		if s != nil && r.up {
			a, b, net := s.inc, r.inc, r.net
			net.Sever(a, b)
			r.poke()
			over(func() { net.Heal(a, b) })
		}
	}
}

// toHost is a fault of one node.
func (w *world) toHost(f Fault, h *host, over func(func())) {
	var s *sender
	var r *receiver
	switch f.Host[0] {
	case 's':
		s = w.senders[h.id-len(w.receivers)]
	case 'r':
		r = w.receivers[h.id]
	}
	switch f.Kind {
	case Crash:
		if h.up && h.stopped == 0 {
			h.kill()
			over(h.boot)
		}
	case Stop:
		if h.up {
			h.stop()
			h.stood += f.For
			over(h.goOn)
		}
	case Slow:
		h.slow++
		over(func() { h.slow-- })
	case ClockJump:
		h.jump += f.For
		h.stood += f.For
		h.wake = never
		h.poke()
	case Engine:
		switch {
		case s != nil && s.up:
			s.loseEngine()
		case r != nil && r.up:
			r.loseEngine()
		}
	case Reorder:
		if r != nil {
			r.reorder++
			over(func() { r.reorder-- })
		}
	case LoseData:
		if r != nil {
			r.lossy++
			over(func() { r.lossy-- })
		}
	}
}

func showRequest(r localapi.Request) string {
	switch r := r.(type) {
	case *localapi.Hello:
		return "hello " + r.EngineID
	case *localapi.Begin:
		return "begin " + r.Req
	case *localapi.Stage:
		return "stage " + digits(int(r.N)) + " for " + r.Req
	case *localapi.Unstage:
		return "unstage " + r.Req
	case *localapi.Submit:
		return "submit " + digits(len(r.Chunks)) + " chunks of " + r.Req
	case *localapi.Cancel:
		return "cancel " + r.Req
	case *localapi.Wait:
		return "wait for " + r.Req
	case *localapi.Claim:
		return "claim " + r.Req
	case *localapi.Release:
		return "release " + r.Req
	}
	return "something"
}

func showEvent(e localapi.Event) string {
	switch e := e.(type) {
	case *localapi.Granted:
		return e.Req + " is granted"
	case *localapi.Ended:
		return e.Req + " is " + ending{e.Ending, e.Reason}.String() + " " + e.Text
	}
	return "something"
}
