package node

import (
	"log/slog"

	"golang.org/x/time/rate"

	"github.com/berthkv/berth/internal/intake"
	"github.com/berthkv/berth/internal/msg"
	"github.com/berthkv/berth/internal/outbound"
)

// noteLog is a logger with a rate limit for each kind of line (R11): at most
// notesPerSecond of a kind, with a burst; what is left out is counted.
type noteLog struct {
	*slog.Logger
	limits map[string]*rate.Limiter // owned by the loop; its keys are constants
}

const (
	notesPerSecond = 20
	notesBurst     = 50
)

func newNoteLog(l *slog.Logger) *noteLog {
	if l == nil {
		l = slog.New(slog.DiscardHandler)
	}
	return &noteLog{l, map[string]*rate.Limiter{}}
}

func (l *noteLog) allow(kind string) bool {
	r := l.limits[kind]
	if r == nil {
		r = rate.NewLimiter(notesPerSecond, notesBurst)
		l.limits[kind] = r
	}
	return r.Allow()
}

// noteKind is the name of a note in logs and metrics, and how loud it is.
type noteKind struct {
	name  string
	level slog.Level
}

// intakeNotes and outboundNotes name every kind of note; their order is that
// of the constants.
var intakeNotes = [...]noteKind{
	intake.NoteWaiting:       {"request_waiting", slog.LevelDebug},
	intake.NoteAdmitted:      {"request_admitted", slog.LevelDebug},
	intake.NoteRefused:       {"request_refused", slog.LevelWarn},
	intake.NoteEnded:         {"request_ended", slog.LevelInfo},
	intake.NoteReleased:      {"request_released", slog.LevelDebug},
	intake.NoteUnclaimed:     {"unclaimed_expired", slog.LevelWarn},
	intake.NoteLeaseExpired:  {"lease_expired", slog.LevelWarn},
	intake.NoteSession:       {"session", slog.LevelInfo},
	intake.NotePeerRefused:   {"peer_refused", slog.LevelWarn},
	intake.NoteQuarantined:   {"quarantined", slog.LevelInfo},
	intake.NoteTrusted:       {"quarantine_trusted", slog.LevelWarn},
	intake.NoteViolation:     {"violation", slog.LevelWarn},
	intake.NoteChecksum:      {"checksum_error", slog.LevelError},
	intake.NoteEndingEvicted: {"ending_evicted", slog.LevelWarn},
}

var outboundNotes = [...]noteKind{
	outbound.NoteBegun:       {"request_begun", slog.LevelDebug},
	outbound.NoteGranted:     {"request_granted", slog.LevelDebug},
	outbound.NoteEnded:       {"request_ended", slog.LevelInfo},
	outbound.NoteSession:     {"session", slog.LevelInfo},
	outbound.NotePeerLost:    {"peer_lost", slog.LevelWarn},
	outbound.NoteRetry:       {"write_retry", slog.LevelInfo},
	outbound.NoteLinkUp:      {"link_up", slog.LevelInfo},
	outbound.NoteLinkDown:    {"link_down", slog.LevelWarn},
	outbound.NoteQuarantined: {"quarantined", slog.LevelInfo},
	outbound.NoteTrusted:     {"quarantine_trusted", slog.LevelWarn},
	outbound.NoteViolation:   {"violation", slog.LevelWarn},
}

// level raises the line of a request that ended badly.
func (k noteKind) levelOf(e msg.Ending) slog.Level {
	if e == msg.EndFailed && k.level < slog.LevelWarn {
		return slog.LevelWarn
	}
	return k.level
}

func (n *Node) noteIntake(a intake.Note) {
	if d := n.cfg.Drive; d != nil {
		d.noted(a)
	}
	k := intakeNotes[a.Kind]
	switch {
	case a.Kind == intake.NoteAdmitted:
		n.stats.admitted(a.Wait.Seconds())
	case a.Kind == intake.NoteEnded && a.Ending == msg.EndReady:
		n.stats.transferred(a.Count, a.Bytes, a.Transfer.Seconds())
	}
	n.stats.with(func(c *Snapshot) {
		switch a.Kind {
		case intake.NoteWaiting:
			c.Admissions["waited"]++
		case intake.NoteAdmitted:
			c.Admissions["admitted"]++
		case intake.NoteRefused:
			c.Admissions[string(a.Reason)]++
		case intake.NoteEnded:
			c.Endings[Label{"receive", string(a.Ending), string(a.Reason)}]++
			if a.Ending == msg.EndReady {
				c.Bytes[Label{"receive", a.Link}] += uint64(a.Bytes)
			}
		}
		c.count("receive", k.name, a.Count)
	})
	n.note(k, a.Ending, "receive", a.Owner, a.ReqID, string(a.Reason), a.Text, a.Link, a.Count, a.Wait.Seconds())
}

func (n *Node) noteOutbound(a outbound.Note) {
	if d := n.cfg.Drive; d != nil {
		d.noted(a)
	}
	k := outboundNotes[a.Kind]
	n.stats.with(func(c *Snapshot) {
		switch a.Kind {
		case outbound.NoteGranted:
			observe(c.Admission, "send", a.Wait.Seconds())
		case outbound.NoteEnded:
			c.Endings[Label{"send", string(a.Ending), string(a.Reason)}]++
			if a.Ending == msg.EndReady {
				c.Bytes[Label{"send", a.Link}] += uint64(a.Bytes)
				observe(c.Transfer, a.Link, a.Wait.Seconds())
			}
		}
		c.count("send", k.name, a.Count)
	})
	n.note(k, a.Ending, "send", a.Peer, a.ReqID, string(a.Reason), a.Text, a.Link, a.Count, a.Wait.Seconds())
}

func (c *Snapshot) count(side, kind string, slots int64) {
	c.Events[Label{side, kind}]++
	c.Slots[Label{side, kind}] += uint64(max(slots, 0))
}

// note writes one line, unless its kind has had its share.
func (n *Node) note(k noteKind, e msg.Ending, side, peer, req, reason, text, link string, count int64, wait float64) {
	level := k.levelOf(e)
	if !n.log.Enabled(n.ctx, level) {
		return
	}
	if !n.log.allow(side + "/" + k.name) {
		n.stats.with(func(c *Snapshot) { c.Suppressed[k.name]++ })
		return
	}
	attrs := []any{"side", side}
	for _, p := range [...]struct{ k, v string }{{"peer", peer}, {"req", req}, {"ending", string(e)}, {"reason", reason}, {"link", link}, {"text", text}} {
		if p.v != "" {
			attrs = append(attrs, p.k, p.v)
		}
	}
	if count != 0 {
		attrs = append(attrs, "count", count)
	}
	if wait != 0 {
		attrs = append(attrs, "seconds", wait)
	}
	n.log.Log(n.ctx, level, k.name, attrs...)
}
