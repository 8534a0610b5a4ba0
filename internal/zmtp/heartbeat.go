package zmtp

import "time"

// heartbeat decides when to send a PING and when a silent peer is given up. Times are durations since the connection began.
//
// Any byte from the peer is a sign of life. The peer has timeout to give one after the first PING that none has followed,
// and, if it announced a TTL, must give one within each TTL.
//
// One question tells both ends that the other lives: who was accepted lets the end that dialled ask, and sends no PING while
// that one's come within the TTL in them.
type heartbeat struct {
	interval time.Duration // between PINGs; negative: none
	timeout  time.Duration
	yields   bool // to a peer that asks

	nextPing time.Duration
	asked    time.Duration // when the first unanswered PING went out
	waiting  bool          // there is one
}

// tick says what to do at now, when the peer was last heard at heard, sent its last PING at pinged and announced ttl (0:
// none), and when to call again (0: not until the TTL changes). If dead is true, nothing else counts.
func (h *heartbeat) tick(now, heard, pinged, ttl time.Duration) (ping, dead bool, wait time.Duration) {
	if h.waiting && heard >= h.asked {
		h.waiting = false
	}
	if h.waiting && now-h.asked >= h.timeout || ttl > 0 && now-heard >= ttl {
		return false, true, 0
	}
	if h.interval > 0 {
		if h.yields && ttl > 0 { // but no longer than we would wait ourselves
			h.nextPing = max(h.nextPing, pinged+min(ttl, h.interval+h.timeout))
		}
		if now >= h.nextPing {
			ping = true
			h.nextPing = now + h.interval
			if !h.waiting {
				h.waiting, h.asked = true, now
			}
		}
		wait = h.nextPing - now
		if h.waiting {
			wait = min(wait, h.asked+h.timeout-now)
		}
	}
	if ttl > 0 {
		left := heard + ttl - now
		if wait == 0 || left < wait {
			wait = left
		}
	}
	return ping, false, wait
}
