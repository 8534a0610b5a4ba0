package explore

import (
	"reflect"
	"strings"
	"testing"
	"unsafe"

	"github.com/berthkv/berth/internal/intake"
	"github.com/berthkv/berth/internal/msg"
	"github.com/berthkv/berth/internal/slot"
)

// TestPlants: each fault that is planted is found, by the rule that it breaks,
// and nothing is found where it is not planted. Run with -v it prints the
// shortest trace of each.
func TestPlants(t *testing.T) {
	for _, c := range []struct {
		plant  Plant
		system string
		budget int
		blind  string // a rule that would find it first
		finds  string
	}{
		{PlantDoubleCount, "one/tcp", 0, "", "R1: "},
		{PlantGrantShort, "one/tcp", 0, "", "R2: "},
		{PlantStageFirst, "starved", 0, "", "R3: "},
		{PlantStageFirst, "starved", 0, "R3", "(deadlock)"},
		{PlantSwallow, "hasty/tcp", 0, "", "R4: "},
		{PlantOtherEnding, "queue/tcp", 1, "", "R5: "},
		{PlantFreeOnCancel, "queue/tcp", 1, "", "R6: "},
		{PlantFreeOnCancel, "queue/shm", 1, "", "R6: "},
		{PlantDrainedEarly, "hasty/nixl", 1, "", "R6: "},
		{PlantNoGeneration, "reuse", 1, "", "R7: "},
		{PlantCommitOnGrant, "one/tcp", 0, "", "R7: "},
		{PlantNoEarmark, "order", 0, "", "R8: "},
		{PlantRepeatIsNew, "one/tcp", 1, "", "R9: "},
		{PlantNoWake, "one/tcp", 1, "", "R10: "},
		{PlantNoLimit, "limits", 0, "", "R11: "},
		{PlantDropFence, "one/tcp", 1, "", "R12: "},
		{PlantLeak, "one/tcp", 0, "", "R12: "},
		{PlantSingleLock, "queue/tcp", 0, "", "(deadlock)"},
		{PlantAnyOrder, "ranks/tcp", 0, "", "(deadlock)"},
		{PlantBlockOnGrant, "queue/tcp", 0, "", "(deadlock)"},
		{PlantBlockOnGrant, "ranksqueue/tcp", 0, "", "(deadlock)"},
		{PlantOneOwner, "lockstep", 0, "", "(deadlock)"},
	} {
		name := string(c.plant) + "/" + strings.ReplaceAll(c.system, "/", "-")
		if c.blind != "" {
			name += "/without_" + c.blind
		}
		t.Run(name, func(t *testing.T) {
			m, err := build(c.system, c.budget, c.plant, c.blind)
			if err != nil {
				t.Fatal(err)
			}
			r := search(m, limits{reduced: true})
			if !strings.Contains(r.bad, c.finds) {
				t.Fatalf("%q is not found, but %q in %s", c.finds, r.bad, r)
			}
			if r, m = shortest(r, m, c.system, c.budget, c.plant, c.blind); !strings.Contains(r.bad, c.finds) {
				t.Fatalf("%q is not found in the whole graph, but %q in %s", c.finds, r.bad, r)
			}
			t.Logf("%s\n%s\n%s\n%s----\n", r, r.bad, head(c.system, c.budget, c.plant, c.blind), script(m, r.moves))
			clean, err := build(c.system, c.budget, "", "")
			if err != nil {
				t.Fatal(err)
			}
			if r := search(clean, limits{states: 1000}); r.bad != "" {
				t.Fatalf("without the plant: %s\n%s", r.bad, script(clean, r.moves))
			}
		})
	}
}

// Faults that the world around a core cannot plant are poked into its memory.
func init() {
	pokes[PlantDoubleCount] = poke{after: func(c *intake.Core, e intake.Event) {
		if _, ok := e.(intake.Release); ok { // one slot comes free twice
			count := field(reflect.ValueOf(c).Elem().FieldByName("pool").Elem(), "count")
			count.Index(int(slot.Free)).SetInt(count.Index(int(slot.Free)).Int() + 1)
		}
	}}
	// While a first batch is stepped, the incomplete requests of other owners in
	// lock-step are not counted.
	pokes[PlantOneOwner] = poke{before: func(c *intake.Core, e intake.Event) func() {
		r, ok := e.(intake.Received)
		if !ok {
			return func() {}
		}
		if _, ok := r.Msg.(*msg.AllocRequest); !ok {
			return func() {}
		}
		core := reflect.ValueOf(c).Elem()
		conn := core.FieldByName("conns").MapIndex(reflect.ValueOf(r.Conn))
		own := conn.Elem().FieldByName("owner")
		others := int64(0)
		for it := core.FieldByName("identities").MapRange(); it.Next(); {
			if p := it.Value(); p.Pointer() != own.Pointer() && p.Elem().FieldByName("unanswered").Int() > 0 {
				others += p.Elem().FieldByName("incomplete").Int()
			}
		}
		f, told := field(core, "lockStep"), field(core.FieldByName("blocked"), "lockStep")
		f.SetInt(f.Int() - others)
		return func() {
			f.SetInt(f.Int() + others)
			told.SetInt(f.Int())
		}
	}}
}

// field is a field that is not exported, to be set.
func field(of reflect.Value, name string) reflect.Value {
	f := of.FieldByName(name)
	return reflect.NewAt(f.Type(), unsafe.Pointer(f.UnsafeAddr())).Elem()
}
