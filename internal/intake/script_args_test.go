package intake

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/msg"
)

// ---- reading arguments ----

func (s *script) num(v string) int64 {
	n, err := strconv.ParseInt(v, 0, 64)
	if err != nil {
		s.t.Fatal(err)
	}
	return n
}

func (s *script) duration(v string) kv.Duration {
	d, err := time.ParseDuration(v)
	if err != nil {
		s.t.Fatal(err)
	}
	return kv.Duration(d)
}

func (a args) conn() kv.ConnID {
	id, ok := a.s.conns[a.word[0]]
	if !ok {
		a.s.t.Fatalf("connection %s is not known", a.word[0])
	}
	return id
}

func (a args) at(i int) int64 { return a.s.num(a.word[i]) }

func (a args) str(key, def string) string {
	if v, ok := a.val[key]; ok {
		return v
	}
	return def
}

func (a args) num(key string, def int64) int64 {
	if v, ok := a.val[key]; ok {
		return a.s.num(v)
	}
	return def
}

func (a args) millis(key string) int64 {
	if v, ok := a.val[key]; ok {
		if n, err := strconv.ParseInt(v, 10, 64); err == nil {
			return n
		}
		return a.s.duration(v).Millis()
	}
	return 0
}

// seq numbers a connection's requests from 1, unless the script says which.
func (a args) seq() uint64 {
	if n := a.num("seq", 0); n != 0 {
		return uint64(n)
	}
	a.s.seqs[a.word[0]]++
	return a.s.seqs[a.word[0]]
}

func (a args) call() kv.CallID {
	a.s.seqs["calls"]++
	return kv.CallID(a.num("call", int64(a.s.seqs["calls"])))
}

// id is a name: "-" is the empty one, "x*600" is 600 of x.
func (a args) id(i int) string {
	if i >= len(a.word) {
		return ""
	}
	return expand(a.word[i])
}

func expand(w string) string {
	if w == "-" {
		return ""
	}
	if c, n, ok := strings.Cut(w, "*"); ok {
		k, _ := strconv.Atoi(n)
		return strings.Repeat(c, k)
	}
	return w
}

// numbers reads "0-3,7".
func (a args) numbers(i int) []int64 {
	if i >= len(a.word) || a.word[i] == "-" {
		return nil
	}
	var out []int64
	for _, p := range strings.Split(a.word[i], ",") {
		from, to, ok := strings.Cut(p, "..")
		if !ok {
			to = from
		}
		for n := a.s.num(from); n <= a.s.num(to); n++ {
			out = append(out, n)
		}
	}
	return out
}

// keys reads "a,b" or "k0..4", which is k0,k1,k2,k3,k4; "-" is none.
func (a args) keys(i int) []string {
	if i >= len(a.word) || a.word[i] == "-" {
		return []string{}
	}
	var out []string
	for _, p := range strings.Split(a.word[i], ",") {
		from, to, ok := strings.Cut(p, "..")
		if !ok {
			out = append(out, expand(p))
			continue
		}
		stem := strings.TrimRight(from, "0123456789")
		for n := a.s.num(from[len(stem):]); n <= a.s.num(to); n++ {
			out = append(out, fmt.Sprintf("%s%d", stem, n))
		}
	}
	return out
}

func (a args) shape() []int64 {
	w, ok := a.val["shape"]
	if !ok {
		return []int64{2, 1, 16, 1}
	}
	var out []int64
	for _, p := range strings.Split(w, "x") {
		out = append(out, a.s.num(p))
	}
	return out
}

func (a args) hello() *msg.Hello {
	m := &msg.Hello{Seq: a.seq(), Min: 1, Max: 1, Role: msg.Role(a.str("role", "sender")), Node: "node", Incarnation: incarnation(a.word[1]),
		Resume: a.val["resume"] != ""}
	if p := a.s.core.sessions[m.Incarnation]; m.Resume && p != nil {
		m.Session = uint64(a.num("session", int64(p.opener)))
	}
	copy(m.Secret[:], a.str("secret", "secret of "+a.word[1]))
	if v, ok := a.val["versions"]; ok {
		lo, hi, _ := strings.Cut(v, "-")
		m.Min, m.Max = uint64(a.s.num(lo)), uint64(a.s.num(hi))
	}
	if m.Role == msg.RoleSender && a.val["facts"] != "none" {
		f := a.s.core.cfg.Facts
		f.SlotBytes, f.ChunkTokens = a.num("slot_bytes", f.SlotBytes), a.num("chunk_tokens", f.ChunkTokens)
		f.TPSize, f.TPRank = a.num("tp_size", f.TPSize), a.num("tp_rank", f.TPRank)
		f.Format, f.DType = kv.Format(a.num("fmt", int64(f.Format))), kv.DType(a.str("dtype", string(f.DType)))
		m.Facts = &f
	}
	return m
}

// commit names chunks with the keys k0, k1, ... (key=x: x0, x1, ...); tokens are
// those of the last one.
func (a args) commit() *msg.Commit {
	m := &msg.Commit{Seq: a.seq(), Begin: uint64(a.at(1)), Fmt: kv.Format(a.num("fmt", 1)), DType: kv.DType(a.str("dtype", "bfloat16")), Shape: a.shape()}
	if v, ok := a.val["end"]; ok {
		m.HasEnd, m.End = true, a.s.num(v)
	}
	chunks := a.numbers(2)
	for i, n := range chunks {
		k := msg.Chunk{Index: n, Key: fmt.Sprintf("%s%d", expand(a.str("key", "k")), n), Tokens: 16}
		if i == len(chunks)-1 {
			k.Tokens = a.num("tokens", 16)
		}
		if a.val["sum"] != "" {
			k.HasChecksum, k.Checksum = true, uint32(a.num("sum", 0))
		}
		if v, ok := a.val["src"]; ok {
			slot, gen, _ := strings.Cut(v, "/")
			k.Src = &msg.Source{Slot: kv.SlotID(a.s.num(slot) + int64(i)), Generation: kv.Generation(a.s.num(gen))}
		}
		m.Chunks = append(m.Chunks, k)
	}
	return m
}

func (a args) alloc() *msg.AllocRequest {
	return &msg.AllocRequest{Keys: a.keys(2), Fmt: kv.Format(a.num("fmt", 1)), Shape: a.shape(), DType: kv.DType(a.str("dtype", "bfloat16")),
		LastChunkToks: a.num("toks", 16), ReqID: a.id(1), IsLastBatch: a.val["last"] != "", TotalChunks: a.num("total", 0)}
}
