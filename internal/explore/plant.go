package explore

import (
	"github.com/berthkv/berth/internal/intake"
)

// plant is a fault that is planted on purpose, in what surrounds the cores, to
// show that the search finds it; plantNone for the real thing.
type plant string

const (
	plantNone          plant = ""
	plantAnyOrder      plant = "ranks-in-any-order"
	plantStageFirst    plant = "stage-before-reserve"
	plantCommitOnGrant plant = "commit-on-grant"
	plantFreeOnCancel  plant = "free-on-cancel"
	plantDropFence     plant = "fence-dropped"
	plantNoGeneration  plant = "staging-without-generation"
	plantSingleLock    plant = "single-lock"
	plantBlockOnGrant  plant = "block-before-granted"
	plantNoWake        plant = "no-wake"
	plantLeak          plant = "release-forgets-a-chunk"
)

func (p plant) is(q plant) bool { return p == q }

func (p plant) limit(n int) int  { return n }
func (p plant) bypass(n int) int { return n }

func (p plant) beforeRecv(c *intake.Core, e intake.Event) func() { return func() {} }
func (p plant) afterRecv(c *intake.Core, e intake.Event)         {}

func (w *world) plantToS(n int, m msgID) msgID { return m }

func (w *world) holdsBack(n int, k *conn) bool { return false }

func (w *world) blockedOnGrant(e int) bool { return false }

func (w *world) stagedFirst(n int) int { return 0 }
