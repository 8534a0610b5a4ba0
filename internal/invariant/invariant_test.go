package invariant

import (
	"errors"
	"fmt"
	"testing"
)

// TestEnabledOnly: both builds of this test prove that assertions are there with
// the tag and gone without it.
func TestEnabledOnly(t *testing.T) {
	for name, fail := range map[string]func(){
		"Check":  func() { Check(func() error { return errors.New("1: free is -1") }) },
		"Assert": func() { Assert(false, "free is %d", -1) },
	} {
		t.Run(name, func(t *testing.T) {
			defer func() {
				if got := recover(); (got != nil) != Enabled {
					t.Errorf("panicked with %v; Enabled is %v", got, Enabled)
				}
			}()
			fail()
		})
	}
	Check(func() error { return nil })
	Assert(true, "never seen")
}

func TestFreeWhenOff(t *testing.T) {
	if Enabled {
		t.Log("assertions are on: nothing to measure")
		return
	}
	called := 0
	n := testing.AllocsPerRun(100, func() {
		Check(func() error { called++; return fmt.Errorf("called") })
	})
	if n != 0 || called != 0 {
		t.Errorf("%v allocations, %d calls", n, called)
	}
}
