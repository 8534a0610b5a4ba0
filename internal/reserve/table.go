package reserve

import "github.com/berthkv/berth/internal/invariant"

// table finds a slab index (never 0) by a caller's number: a hash table with
// linear probing that moves entries back on deletion, so that it never fills
// with tombstones and, once grown, never allocates. Numbers come from counters, so
// neighbours live at the same time; groups of eight are kept together in memory.
type table struct {
	entries []entry // length 0 or a power of two, at most half full
	used    int
}

type entry struct {
	key uint64
	val int32 // 0: empty
}

// home is where the search for key begins.
func home(key uint64) uint64 { return scatter(key>>3)<<3 | key&7 }

// find returns the position of key, or of the hole where it would go.
func (t *table) find(key uint64) uint64 {
	mask := uint64(len(t.entries) - 1)
	i := home(key) & mask
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
	i := t.find(key)
	invariant.Assert(t.entries[i].val == 0, "a key is put twice")
	t.entries[i] = entry{key, val}
	t.used++
}

// remove takes out a key that is in the table.
func (t *table) remove(key uint64) {
	mask := uint64(len(t.entries) - 1)
	hole := t.find(key)
	invariant.Assert(t.entries[hole].val != 0, "a key is removed that is not there")
	t.used--
	for i := (hole + 1) & mask; t.entries[i].val != 0; i = (i + 1) & mask {
		// An entry may move back to the hole unless its home lies after it.
		if (i-home(t.entries[i].key))&mask >= (i-hole)&mask {
			t.entries[hole], hole = t.entries[i], i
		}
	}
	t.entries[hole] = entry{}
}
