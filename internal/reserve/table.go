package reserve

import (
	"slices"

	"github.com/berthkv/berth/internal/invariant"
)

// table finds a slab index (never 0) by a caller's number: a hash table whose
// chains are links between the indices, so that it is small, removal moves
// nothing, and once grown it never allocates. Numbers come from counters, so
// neighbours live at the same time; chains of sixteen are neighbours in memory.
type table struct {
	heads []int32 // length 0 or a power of two, at least used; 0: empty
	links []link  // by slab index
	used  int
}

type link struct {
	key  uint64
	next int32 // in the chain; 0: none
}

// head returns where the chain of key begins.
func (t *table) head(key uint64) *int32 {
	return &t.heads[(scatter(key>>4)<<4|key&15)&uint64(len(t.heads)-1)]
}

// get returns the index of key, 0 if there is none.
func (t *table) get(key uint64) int32 {
	if t.used == 0 {
		return 0
	}
	i := *t.head(key)
	for i != 0 && t.links[i].key != key {
		i = t.links[i].next
	}
	return i
}

// key returns the key of an index that is in the table.
func (t *table) key(i int32) uint64 { return t.links[i].key }

// put adds a key that is not in the table.
func (t *table) put(key uint64, i int32) {
	if invariant.Enabled {
		invariant.Assert(t.get(key) == 0, "a key is put twice")
	}
	if t.used == len(t.heads) {
		t.grow()
	}
	for int(i) >= len(t.links) {
		t.links = append(t.links, link{})
	}
	h := t.head(key)
	t.links[i], *h = link{key, *h}, i
	t.used++
}

func (t *table) grow() {
	old := t.heads
	t.heads = make([]int32, max(16, 2*len(old)))
	for _, i := range old {
		for i != 0 {
			l := &t.links[i]
			h, next := t.head(l.key), l.next
			l.next, *h = *h, i
			i = next
		}
	}
}

// remove takes out an index that is in the table.
func (t *table) remove(i int32) {
	at := t.head(t.links[i].key)
	for *at != i {
		invariant.Assert(*at != 0, "an index is removed that is not there")
		at = &t.links[*at].next
	}
	*at = t.links[i].next
	t.used--
}

func (t *table) clone() table {
	return table{heads: slices.Clone(t.heads), links: slices.Clone(t.links), used: t.used}
}
