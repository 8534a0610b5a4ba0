package faultlink

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berthkv/berth/internal/fault"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/link"
	"github.com/berthkv/berth/internal/link/linktest"
	"github.com/berthkv/berth/internal/link/shmlink"
	"github.com/berthkv/berth/internal/link/tcplink"
)

// A link that is only slower still passes the suite.
var slow = Plan{Delay: 50 * time.Microsecond, BytesPerSecond: 4 << 30}

func TestSlowTCP(t *testing.T) {
	linktest.Run(t, func() *linktest.Harness {
		return &linktest.Harness{
			Caps:    link.Caps{Mode: link.Stream, ExactFence: true},
			Wrapped: true,
			NewReceiver: func(tb testing.TB, c linktest.ReceiverConfig, ev link.ReceiverEvents) link.Receiver {
				return wrapped(tb, c, ev, func(ev link.ReceiverEvents) (link.Receiver, error) {
					return tcplink.NewReceiver(tcplink.ReceiverConfig{Incarnation: c.Incarnation, Pool: c.Pool, Listen: "127.0.0.1:0", Checksum: c.Checksum}, ev)
				})
			},
			NewSender: func(_ testing.TB, c linktest.SenderConfig) link.Sender {
				return Sender(tcplink.NewSender(tcplink.SenderConfig{Pool: c.Pool}), slow)
			},
		}
	})
}

var paths atomic.Int64

func TestSlowShm(t *testing.T) {
	linktest.Run(t, func() *linktest.Harness {
		return &linktest.Harness{
			Caps: link.Caps{Mode: link.Pull, ExactFence: true},
			NewReceiver: func(tb testing.TB, c linktest.ReceiverConfig, ev link.ReceiverEvents) link.Receiver {
				return wrapped(tb, c, ev, func(ev link.ReceiverEvents) (link.Receiver, error) {
					path := fmt.Sprintf("@berth-faultlink-test-%d-%d", unix.Getpid(), paths.Add(1))
					return shmlink.NewReceiver(shmlink.ReceiverConfig{Incarnation: c.Incarnation, Pool: c.Pool, Path: path, Checksum: c.Checksum}, ev)
				})
			},
			NewSender: func(tb testing.TB, c linktest.SenderConfig) link.Sender {
				staging, err := c.Staging.ReadOnlyFD()
				if err != nil {
					tb.Fatal(err)
				}
				words, err := c.Generations.ReadOnlyFD()
				if err != nil {
					tb.Fatal(err)
				}
				tb.Cleanup(func() {
					unix.Close(staging)
					unix.Close(words)
				})
				return Sender(shmlink.NewSender(shmlink.SenderConfig{Slots: c.Staging.Slots(), SlotBytes: c.Staging.SlotBytes(), Staging: staging, Generations: words}), slow)
			},
		}
	})
}

func wrapped(tb testing.TB, c linktest.ReceiverConfig, ev link.ReceiverEvents, build func(link.ReceiverEvents) (link.Receiver, error)) link.Receiver {
	r, err := Receiver(slow, c.Pool, ev, build)
	if err != nil {
		tb.Fatal(err)
	}
	return r
}

// inner is a link whose two halves do nothing but note.
type inner struct {
	link.Receiver
	link.Sender
	link.Conn
	ev     link.SenderEvents
	rev    link.ReceiverEvents
	passed []time.Duration // since start
	ids    []link.WriteID
	start  time.Time
}

func (f *inner) Caps() link.Caps { return link.Caps{} }
func (f *inner) Connect(_ context.Context, _ link.Peer, ev link.SenderEvents) (link.Conn, error) {
	f.ev = ev
	return f, nil
}
func (f *inner) Write(ws []link.Write) {
	f.passed = append(f.passed, time.Since(f.start))
	f.ids = append(f.ids, ws[0].ID)
}
func (f *inner) Pull(_ kv.Incarnation, _ kv.Generation, items []link.PullItem) {
	f.passed = append(f.passed, time.Since(f.start))
}
func (f *inner) Revoke(kv.Generation, []kv.SlotID) {}
func (f *inner) Abort([]link.WriteID)              {}
func (f *inner) Settle([]link.WriteID)             {}
func (f *inner) Close() error                      { return nil }

func TestRateAndDelay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &inner{start: time.Now()}
		c, _ := Sender(f, Plan{BytesPerSecond: 1000, Delay: 5 * time.Second}).Connect(t.Context(), link.Peer{}, link.SenderEvents{})
		for i := range 3 {
			c.Write([]link.Write{{ID: link.WriteID(i), Bytes: 2000}})
		}
		<-time.After(20 * time.Second)
		synctest.Wait()
		if got, want := fmt.Sprint(f.passed), "[5s 7s 9s]"; got != want {
			t.Errorf("passed on at %s, want %s", got, want)
		}
		c.Write([]link.Write{{ID: 3, Bytes: 1}})
		<-time.After(20 * time.Second)
		synctest.Wait()
		if got := f.passed[3]; got != 25*time.Second {
			t.Errorf("passed on at %v after a pause", got)
		}
		c.Close()
	})
}

func TestHeldWrites(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &inner{start: time.Now()}
		var lost []link.WriteID
		down := 0
		ev := link.SenderEvents{
			Lost: func(ids []link.WriteID, _ error) { lost = append(lost, ids...) },
			Down: func(error) { down = len(lost) },
		}
		c, _ := Sender(f, Plan{Delay: time.Second, Lose: func(w link.Write) bool { return w.ID == 2 }}).Connect(t.Context(), link.Peer{}, ev)
		for i := range 4 {
			c.Write([]link.Write{{ID: link.WriteID(i)}})
		}
		c.Abort([]link.WriteID{0})
		c.Settle([]link.WriteID{1})
		<-time.After(2 * time.Second)
		synctest.Wait()
		if fmt.Sprint(lost, f.ids) != "[0 2] [3]" {
			t.Errorf("lost %v, passed on %v", lost, f.ids)
		}
		c.Write([]link.Write{{ID: 4}})
		f.ev.Down(errors.New("down"))
		if fmt.Sprint(lost) != "[0 2 4]" || down != 3 {
			t.Errorf("lost %v, %d of them before Down", lost, down)
		}
		c.Write([]link.Write{{ID: 5}})
		c.Close()
		if fmt.Sprint(lost, f.ids) != "[0 2 4 5] [3]" {
			t.Errorf("lost %v, passed on %v", lost, f.ids)
		}
	})
}

func TestConnectRefused(t *testing.T) {
	refuse := errors.New("no")
	_, err := Sender(&inner{}, Plan{Connect: func(link.Peer) error { return refuse }}).Connect(t.Context(), link.Peer{}, link.SenderEvents{})
	if !errors.Is(err, refuse) {
		t.Error(err)
	}
}

func TestReceiver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &inner{start: time.Now()}
		pool := link.Pool{Bytes: make([]byte, 20), SlotBytes: 10}
		var landed []link.Landing
		failed := 0
		r, err := Receiver(Plan{
			Delay: time.Second,
			Lose:  func(w link.Write) bool { return w.Src == 7 },
			Flip:  func(l link.Landing) (int64, bool) { return 3, l.Slot == 1 },
		}, pool, link.ReceiverEvents{
			Landed: func(ls []link.Landing) { landed = append(landed, ls...) },
			Failed: func(kv.SlotID, kv.Generation, *fault.Error) { failed++ },
		}, func(ev link.ReceiverEvents) (link.Receiver, error) { f.rev = ev; return f, nil })
		if err != nil {
			t.Fatal(err)
		}
		r.Pull(kv.Incarnation{}, 1, []link.PullItem{{Src: 7}, {Src: 8}, {Slot: 1, Src: 9}})
		r.Revoke(1, []kv.SlotID{1})
		<-time.After(2 * time.Second)
		synctest.Wait()
		if failed != 1 || len(f.passed) != 1 {
			t.Errorf("%d failed, %d passed on", failed, len(f.passed))
		}
		f.rev.Landed([]link.Landing{{Slot: 0, Bytes: 10}, {Slot: 1, Bytes: 10, HasSum: true, Sum: 1}})
		if pool.Bytes[3] != 0 || pool.Bytes[13] != 1 || landed[0].Sum != 0 || landed[1].Sum == 1 {
			t.Errorf("pool %v, landed %+v", pool.Bytes, landed)
		}
		r.Close()
	})
	if _, err := Receiver(Plan{}, link.Pool{}, link.ReceiverEvents{}, func(link.ReceiverEvents) (link.Receiver, error) { return nil, errPlan }); err == nil {
		t.Error("no error")
	}
}
