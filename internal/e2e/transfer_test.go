package e2e

import (
	"fmt"
	"sync"
	"testing"

	"github.com/berthkv/berth"
)

// r24, r30: every byte arrives, over each link, in one batch or several, many at
// a time; afterwards every slot of both pools is free (R12).
func TestTransfer(t *testing.T) {
	for _, link := range []string{"shm", "tcp"} {
		for _, checksum := range []string{"false", "true"} {
			t.Run(link+"/checksum="+checksum, func(t *testing.T) {
				more := settings{"links": link, "checksum": checksum}
				r := startAgent(t, receiving(t, 24).with(more))
				s := startAgent(t, sending(8).with(more))
				sender, receiver := s.engine(t), r.engine(t)
				var wg sync.WaitGroup
				turn := make(chan struct{}, 1) // an engine holds staged slots of one request at a time
				for i := range 24 {
					wg.Go(func() {
						req, total := fmt.Sprintf("req-%d", i), 1+i%7
						tr := begin(t, sender, req, total, r.port())
						granted(t, tr)
						turn <- struct{}{}
						send(t, sender, tr, total)
						<-turn
						if e := ended(t, tr); e.Err() != nil {
							t.Errorf("%s: %+v", req, e)
						}
						receive(t, receiver, req, total)
					})
				}
				wg.Wait()
				r.until(t, "free", allFree)
				s.until(t, "free", allFree)
				if st := s.status(t); len(st.Peers) != 1 || st.Peers[0].Link != link {
					t.Errorf("peers %+v, want one over %s", st.Peers, link)
				}
				if tot := r.status(t).Totals; tot.Ready != 24 || tot.Bytes != tot.Chunks*slotBytes {
					t.Errorf("totals %+v", tot)
				}
			})
		}
	}
}

// The seeds' example, from one sender: two requests of 8 chunks and a pool of
// 10. The second is granted only after the first has been released, and both
// complete (fault 1).
func TestTransfer_two_requests_of_eight_for_ten_slots(t *testing.T) {
	r := startAgent(t, receiving(t, 10))
	s := startAgent(t, sending(10))
	sender, receiver := s.engine(t), r.engine(t)
	a := begin(t, sender, "A", 8, r.port())
	granted(t, a)
	b := begin(t, sender, "B", 8, r.port())
	st := r.until(t, "waiting", func(s berth.Status) bool { return s.Waiting == 1 })
	why := st.Requests[1].Why
	if why == nil || why.For != "room" || why.Need != 8 || why.Free != 2 {
		t.Errorf("B waits for %+v; want room, 8 needed and 2 free", why)
	}
	send(t, sender, a, 8)
	if e := ended(t, a); e.Err() != nil {
		t.Fatal(e)
	}
	select {
	case <-b.Granted():
		t.Fatal("B was granted before A was released")
	default:
	}
	receive(t, receiver, "A", 8)
	granted(t, b)
	send(t, sender, b, 8)
	receive(t, receiver, "B", 8)
	r.until(t, "free", allFree)
	s.until(t, "free", allFree)
}
