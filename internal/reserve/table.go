package reserve

// table finds a slab index (never 0) by a caller's number: a hash table with
// linear probing that moves entries back on deletion, so that it never fills
// with tombstones and, once grown, never allocates.
type table struct {
	entries []entry // length 0 or a power of two, at most half full
	used    int
}

type entry struct {
	key uint64
	val int32 // 0: empty
}

// spread is the finalizer of splitmix64: a bijection that scatters its input.
func spread(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// find returns the position of key, or of the hole where it would go.
func (t *table) find(key uint64) uint64 {
	mask := uint64(len(t.entries) - 1)
	i := spread(key) & mask
	for t.entries[i].val != 0 && t.entries[i].key != key {
		i = (i + 1) & mask
	}
	return i
}

// get returns the value of key, 0 if there is none.
func (t *table) get(key uint64) int32 {
	if t.used == 0 {
		return 0
	}
	return t.entries[t.find(key)].val
}

// put adds a key that is not in the table.
func (t *table) put(key uint64, val int32) {
	if 2*(t.used+1) > len(t.entries) {
		old := t.entries
		t.entries = make([]entry, max(16, 2*len(old)))
		for _, e := range old {
			if e.val != 0 {
				t.entries[t.find(e.key)] = e
			}
		}
	}
	t.entries[t.find(key)] = entry{key, val}
	t.used++
}

// remove takes out a key that is in the table.
func (t *table) remove(key uint64) {
	mask := uint64(len(t.entries) - 1)
	hole := t.find(key)
	t.used--
	for i := (hole + 1) & mask; t.entries[i].val != 0; i = (i + 1) & mask {
		// An entry may move back to the hole unless its home lies after it.
		if home := spread(t.entries[i].key) & mask; (i-home)&mask >= (i-hole)&mask {
			t.entries[hole], hole = t.entries[i], i
		}
	}
	t.entries[hole] = entry{}
}
