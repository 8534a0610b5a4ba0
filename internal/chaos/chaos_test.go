package chaos

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

var (
	form    = flag.String("chaos", "smoke", "form of TestChaos: smoke, short or full")
	seed    = flag.Uint64("seed", 0, "of TestChaos and TestSoak; 0: by the time")
	soak    = flag.Duration("soak", 0, "how long TestSoak takes")
	netKind = flag.String("network", "", "namespaces or loopback; default: namespaces where the machine allows them")
	berthAt = flag.String("berth", "", "the berth binary; default: it is built")
)

func TestMain(m *testing.M) {
	if config := os.Getenv(engineEnv); config != "" {
		os.Exit(engineMain(config))
	}
	goleak.VerifyTestMain(m)
}

// berthBinary builds the binary once.
func berthBinary(t *testing.T) string {
	t.Helper()
	if *berthAt != "" {
		path, err := filepath.Abs(*berthAt)
		if err != nil {
			t.Fatal(err)
		}
		return path
	}
	path := filepath.Join(t.TempDir(), "berth")
	out, err := exec.Command("go", "build", "-o", path, "../../cmd/berth").CombinedOutput()
	if err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	return path
}

func newSeed() uint64 {
	if *seed != 0 {
		return *seed
	}
	return uint64(time.Now().UnixNano()) & 0xffff_ffff
}

// carryOut runs and reports; what it found fails the test, with the command that
// runs it again.
func carryOut(t *testing.T, o Options, again string) *Report {
	t.Helper()
	o.Binary, o.Network, o.Out = berthBinary(t), *netKind, os.Stdout
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Hour)
	defer cancel()
	rep, err := Run(ctx, o)
	if rep == nil {
		t.Fatal(err)
	}
	rep.Print(o.Out)
	if err != nil {
		t.Error(err)
	} else if len(rep.Faults) > 0 {
		t.Errorf("%d faults found, see above", len(rep.Faults))
	}
	if t.Failed() {
		t.Logf("seed %d; logs and history are kept in %s; run again: %s", o.Seed, rep.Kept, fmt.Sprintf(again, o.Seed))
	}
	return rep
}

// TestChaos is the deployment under load and faults.
func TestChaos(t *testing.T) {
	o := Options{Seed: newSeed(), Requests: 100, Rounds: 1}
	switch *form {
	case "smoke":
		o.Calm = true
	case "short":
		o.Requests = 1000
	case "full":
		o.Requests, o.Rounds = 10_000, 4
	default:
		t.Fatalf("-chaos is %q; it must be smoke, short or full", *form)
	}
	rep := carryOut(t, o, "make chaos CHAOS="+*form+" SEED=%d")
	if rep.Requests < o.Requests {
		t.Errorf("%d requests, %d were to be made", rep.Requests, o.Requests)
	}
	for _, b := range blows() {
		if !o.Calm && rep.Inflicted[b.name] == 0 {
			t.Errorf("the fault %q was never inflicted", b.name)
		}
	}
}

func timeOf(second int) time.Duration { return time.Duration(second) * time.Second }

// TestPlants: a fault planted in the engines is found, by the rule that it
// breaks, in a run of real processes.
func TestPlants(t *testing.T) {
	for p, rule := range map[plant]string{releaseBeforeCopy: "H", writeAfterSubmit: "H1"} {
		t.Run(string(p), func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
			defer cancel()
			rep, err := Run(ctx, Options{Binary: berthBinary(t), Network: *netKind, Seed: newSeed(), Requests: 300, Calm: true, Plant: p, Out: io.Discard})
			if err != nil {
				t.Fatal(err)
			}
			defer os.RemoveAll(rep.Kept)
			n := 0
			for _, f := range rep.Faults {
				if strings.HasPrefix(f, rule) {
					n++
				}
			}
			if n == 0 {
				t.Errorf("nobody noticed; found only %q", rep.Faults)
			}
			t.Logf("%d faults found, the first: %.300s", len(rep.Faults), rep.Faults[0])
		})
	}
}

// TestSoak is the deployment under load and lesser faults for -soak.
func TestSoak(t *testing.T) {
	o := Options{Seed: newSeed(), Soak: *soak}
	if o.Soak == 0 {
		o.Soak = 3 * time.Second
	}
	carryOut(t, o, "make soak SOAK="+o.Soak.String()+" SEED=%d")
}
