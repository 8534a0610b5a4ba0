package engine

import (
	"context"
	"errors"
	"fmt"
	"math/rand"
	"slices"
	"strings"
	"testing"

	"github.com/berthkv/berth/internal/engine/model"
	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
)

func TestAnswer(t *testing.T) {
	for _, c := range []struct {
		limits
		text string // of the tokens; "$" is EOS
		want string // a piece a token, and the end
	}{
		{limits{maxTokens: 3}, "abc", "a|b|c length"},
		{limits{maxTokens: 9}, "ab$", "a|b| stop"},
		{limits{maxTokens: 3, ignoreEOS: true}, "a$b", "a||b length"},
		{limits{maxTokens: 3}, "ab$", "a|b| stop"},
		{limits{maxTokens: 9, stop: []string{"b"}}, "ab", "a| stop b"},
		{limits{maxTokens: 9, stop: []string{"bcd"}}, "abcabcd", "a|||bca||| stop bcd"},
		{limits{maxTokens: 9, stop: []string{"aab"}}, "aaab", "||a| stop aab"},
		{limits{maxTokens: 3, stop: []string{"xyz"}}, "axy", "a||xy length"},
		{limits{maxTokens: 9, stop: []string{"xyz"}}, "ax$", "a||x stop"},
		{limits{maxTokens: 9, stop: []string{"bc", "abcd"}}, "abc", "||a stop bc"},
		{limits{maxTokens: 2, stop: []string{"b"}}, "ab", "a| stop b"},
	} {
		a := answer{limits: c.limits}
		var got []string
		for i, b := range []byte(c.text) {
			token := int(b)
			if b == '$' {
				token = model.EOS
			}
			text, why, by := a.push(token)
			if by != "" {
				by = " " + by
			}
			if why != "" {
				text += " " + string(why) + by
			}
			got = append(got, text)
			if (why != "") != (i == len(c.text)-1) {
				t.Errorf("%q ended after %d tokens", c.text, i+1)
			}
		}
		if s := strings.Join(got, "|"); s != c.want {
			t.Errorf("%q with %+v: %q, want %q", c.text, c.limits, s, c.want)
		}
	}
}

// What comes out is what a search over the whole text would give.
func TestAnswerRandom(t *testing.T) {
	rng := rand.New(rand.NewSource(1))
	word := func(n int) string {
		b := make([]byte, n)
		for i := range b {
			b[i] = 'a' + byte(rng.Intn(2))
		}
		return string(b)
	}
	for range 5000 {
		a := answer{limits: limits{maxTokens: 1 + rng.Intn(20)}}
		for range rng.Intn(3) {
			a.stop = append(a.stop, word(1+rng.Intn(5)))
		}
		full, got, why, by := word(20), "", finish(""), ""
		n := 0
		for ; why == ""; n++ {
			var text string
			text, why, by = a.push(int(full[n]))
			got += text
		}
		// The dumb way: after each token, look at all the text so far.
		want, wantWhy, wantBy := "", finish(""), ""
		for m := 1; wantWhy == ""; m++ {
			at := -1
			for _, s := range a.stop {
				if i := strings.Index(full[:m], s); i >= 0 && (at < 0 || i < at) {
					at, wantBy = i, s
				}
			}
			switch {
			case at >= 0:
				want, wantWhy = full[:at], finishStop
			case m == a.maxTokens:
				want, wantWhy = full[:m], finishLength
			}
		}
		if got != want || why != wantWhy || by != wantBy {
			t.Fatalf("stop %q of %q: %q %s %q, want %q %s %q", a.stop, full, got, why, by, want, wantWhy, wantBy)
		}
	}
}

func TestKeys(t *testing.T) {
	k := keyer{model: "m", ranks: 2, dtype: "bfloat16", chunk: 4}
	a := k.keys(1, []int{1, 2, 3, 4, 5})
	b := k.keys(1, []int{1, 2, 3, 4, 6})
	c := k.keys(1, []int{9, 2, 3, 4, 5})
	if len(a) != 2 || a[0] != b[0] || a[1] == b[1] || a[0] == c[0] || a[1] == c[1] {
		t.Errorf("%q\n%q\n%q", a, b, c)
	}
	// The chain, computed by another tool.
	want := []string{
		"m@2@1@d8faa8ec8c0500567ca87b56e4bb666d69cb512e638103891defea24e88cbc92@bfloat16",
		"m@2@1@f6ebfbf04b0a6c3f21ed1070e67f557fd4f9d1b6a57db8e2c797ffbd97d1b2f4@bfloat16",
	}
	if !slices.Equal(a, want) {
		t.Errorf("%q, want %q", a, want)
	}
	if n := len(k.keys(0, []int{1, 2, 3, 4})); n != 1 {
		t.Errorf("%d keys for one whole chunk", n)
	}
}

// stager is a transfer whose agent answers by a script.
type stager struct {
	Transfer
	replies []error // Busy, Holding, nil, ...
	asked   []string
	before  func(call int)
}

func (s *stager) Stage(_ context.Context, n int, wait bool) ([]kv.SlotID, error) {
	call := len(s.asked)
	if s.before != nil {
		s.before(call)
	}
	s.asked = append(s.asked, fmt.Sprint(n, wait))
	if err := s.replies[call]; err != nil {
		return nil, err
	}
	return make([]kv.SlotID, n), nil
}

func TestTurnstile(t *testing.T) {
	busy, holding, other := fault.New(fault.Busy, ""), fault.New(fault.Holding, ""), errors.New("other")
	t.Run("takes what there is", func(t *testing.T) {
		var turn turnstile
		s := &stager{replies: []error{busy, busy, nil}}
		slots, err := turn.stage(context.Background(), s, 5)
		if err != nil || len(slots) != 1 || !slices.Equal(s.asked, []string{"5 false", "2 false", "1 true"}) {
			t.Errorf("%v %v %v", slots, err, s.asked)
		}
	})
	t.Run("passes errors on", func(t *testing.T) {
		var turn turnstile
		for _, replies := range [][]error{{other}, {busy, busy, other}} {
			if _, err := turn.stage(context.Background(), &stager{replies: replies}, 5); !errors.Is(err, other) {
				t.Error(err)
			}
		}
	})
	t.Run("asks again after a hand-in", func(t *testing.T) {
		var turn turnstile
		// What is held is handed in while the refusal is on its way.
		s := &stager{replies: []error{holding, nil}, before: func(call int) {
			if call == 0 {
				turn.handIn()
			}
		}}
		if slots, err := turn.stage(context.Background(), s, 1); err != nil || len(slots) != 1 {
			t.Errorf("%v %v", slots, err)
		}
	})
	t.Run("can be cancelled", func(t *testing.T) {
		var turn turnstile
		ctx, cancel := context.WithCancelCause(context.Background())
		s := &stager{replies: []error{holding}, before: func(int) { cancel(other) }}
		if _, err := turn.stage(ctx, s, 1); !errors.Is(err, other) {
			t.Error(err)
		}
	})
}

func TestOutput(t *testing.T) {
	ctx := context.Background()
	o := newOutput()
	o.put(piece{token: 1})
	o.put(piece{token: 2})
	o.fail(errClosing)
	o.put(piece{token: 3})
	if p, err := o.take(ctx); err != nil || len(p) != 3 {
		t.Errorf("%v %v", p, err)
	}
	if p, err := o.take(ctx); !errors.Is(err, errClosing) || len(p) != 0 {
		t.Errorf("%v %v", p, err)
	}
	o = newOutput()
	o.put(piece{token: 1, finish: finishStop})
	o.fail(errClosing) // too late
	if p, err := o.take(ctx); err != nil || len(p) != 1 {
		t.Errorf("%v %v", p, err)
	}
	ended, end := context.WithCancel(ctx)
	end()
	if _, err := o.take(ended); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

func TestWatermark(t *testing.T) {
	var w watermark
	w.raise(3)
	if n, err := w.reach(context.Background(), 2); n != 3 || err != nil {
		t.Errorf("%d %v", n, err)
	}
	ended, end := context.WithCancel(context.Background())
	end()
	if _, err := w.reach(ended, 4); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	done := make(chan int)
	go func() {
		n, _ := w.reach(context.Background(), 5)
		done <- n
	}()
	w.raise(4)
	w.raise(6)
	if n := <-done; n != 6 {
		t.Errorf("%d", n)
	}
}
