package zmtp

import "encoding/binary"

// generatedIdentity is the identity of a peer that announces none: as with libzmq it starts with a zero byte, which no
// announced one may, and it is never used again.
func generatedIdentity(id ConnID) string {
	return string(binary.BigEndian.AppendUint64([]byte{0}, uint64(id)))
}

// identitySet remembers the last identities that were added.
type identitySet struct {
	in   map[string]struct{}
	ring []string // in order of arrival; next is the oldest
	next int
	max  int
}

func newIdentitySet(limit int) identitySet {
	return identitySet{in: make(map[string]struct{}), max: limit}
}

// add remembers id and says whether it was there already. Generated identities are never seen twice and not kept.
func (s *identitySet) add(id string) (again bool) {
	if id[0] == 0 {
		return false
	}
	if _, again = s.in[id]; again {
		return true
	}
	if len(s.ring) < s.max {
		s.ring = append(s.ring, id)
	} else {
		delete(s.in, s.ring[s.next])
		s.ring[s.next] = id
		s.next = (s.next + 1) % s.max
	}
	s.in[id] = struct{}{}
	return false
}
