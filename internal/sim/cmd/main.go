// Command cmd runs the simulator: many seeds, or one scenario from a file.
// `make sim` is the way to it.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"runtime/pprof"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/berthkv/berth/internal/explore"
	"github.com/berthkv/berth/internal/kv"
	"github.com/berthkv/berth/internal/sim"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	os.Exit(run(ctx))
}

// flags of the command.
type flags struct {
	o        sim.Options
	seeds    int
	check    int
	json     bool
	script   string
	trace    bool
	plant    string
	minimise time.Duration
	out      string
	profile  string
}

func parse() (f flags) {
	seed := flag.Uint64("seed", 1, "first seed")
	flag.IntVar(&f.seeds, "seeds", 1, "how many seeds")
	flag.IntVar(&f.o.Requests, "requests", 2000, "requests of each")
	flag.IntVar(&f.o.Senders, "senders", 0, "senders; 0: by the seed, 1 to 8")
	flag.IntVar(&f.o.Receivers, "receivers", 0, "receivers; 0: by the seed, 1 to 4")
	flag.IntVar(&f.o.Capacity, "capacity", 0, "slots of each receive pool; 0: by the seed, 6 to 64")
	flag.IntVar(&f.o.Staging, "staging", 0, "slots of each staging pool; 0: by the seed, 4 to 64")
	load := flag.String("load", "", fmt.Sprintf("pattern of arrivals, one of %v; by the seed if empty", sim.Loads))
	flag.Float64Var(&f.o.Rate, "rate", 0, "arrivals, as a part of what the receivers can take; 0: by the seed")
	faults := flag.String("faults", "", fmt.Sprintf("kinds of faults with commas between, all, or none; by the seed if empty. Kinds: %v", sim.Kinds))
	flag.Float64Var(&f.o.Every, "every", 0, "requests between two faults; 0: by the seed")
	links := flag.String("links", "", "data links with commas between, by turns of the receivers: tcp, shm, nixl; by the seed if empty")
	lease := flag.Float64("lease", 0, "lease_sec; the other times follow it; 0: by the seed, 15 or 3")
	flag.IntVar(&f.check, "check", 0, "turns of a node between two checks of its cores' invariants; 0: 256")
	flag.BoolVar(&f.json, "json", false, "print a report as one JSON object a line")
	flag.StringVar(&f.script, "script", "", "run the scenario in this `file` instead")
	flag.BoolVar(&f.trace, "trace", false, "print everything that happens")
	flag.StringVar(&f.plant, "plant", "", "plant a fault in what surrounds the nodes, to see it found")
	flag.DurationVar(&f.minimise, "minimise", time.Minute, "time to make a failing scenario smaller")
	flag.StringVar(&f.out, "o", "", "write the minimised scenario to this `file`")
	flag.StringVar(&f.profile, "cpuprofile", "", "write a CPU profile to this `file`")
	flag.Parse()
	f.o.Seed, f.o.Load, f.o.Lease = *seed, sim.Load(*load), kv.Duration(*lease*float64(kv.Second))
	usage := func(format string, args ...any) {
		fmt.Fprintf(os.Stderr, "sim: "+format+"\n", args...)
		os.Exit(2)
	}
	switch {
	case flag.NArg() > 0:
		usage("%q: there are flags only", flag.Arg(0))
	case f.seeds < 1 || f.o.Requests < 1:
		usage("-seeds is %d, -requests %d; both must be at least 1", f.seeds, f.o.Requests)
	case *load != "" && !slices.Contains(sim.Loads, f.o.Load):
		usage("-load is %q; it must be one of %v", *load, sim.Loads)
	}
	switch *faults {
	case "":
	case "all":
		f.o.Faults = sim.Kinds
	case "none":
		f.o.Faults = []sim.Kind{}
	default:
		for _, k := range strings.Split(*faults, ",") {
			if !slices.Contains(sim.Kinds, sim.Kind(k)) {
				usage("-faults has %q; it must be of %v", k, sim.Kinds)
			}
			f.o.Faults = append(f.o.Faults, sim.Kind(k))
		}
	}
	if *links != "" {
		f.o.Links = strings.Split(*links, ",")
		for _, l := range f.o.Links {
			if l != "tcp" && l != "shm" && l != "nixl" {
				usage("-links has %q; it must be of tcp, shm, nixl", l)
			}
		}
	}
	return f
}

// run returns the exit code: 0 if no rule was broken.
func run(ctx context.Context) int {
	f := parse()
	if f.profile != "" {
		file, err := os.Create(f.profile)
		if err != nil {
			fmt.Fprintln(os.Stderr, "sim:", err)
			return 2
		}
		pprof.StartCPUProfile(file)
		defer pprof.StopCPUProfile()
	}
	if f.script != "" {
		file, err := os.Open(f.script)
		if err != nil {
			fmt.Fprintln(os.Stderr, "sim:", err)
			return 2
		}
		defer file.Close()
		sc, err := sim.Read(file)
		if err != nil {
			fmt.Fprintf(os.Stderr, "sim: %s: %v\n", f.script, err)
			return 2
		}
		return one(ctx, &f, sc, "go run ./internal/sim/cmd -script "+f.script)
	}
	code := 0
	for range f.seeds {
		if ctx.Err() != nil {
			return 1
		}
		sc := sim.Random(f.o)
		sc.Plant = explore.Plant(f.plant)
		again := sim.Again(f.o)
		if f.plant != "" {
			again += " -plant " + f.plant
		}
		code = max(code, one(ctx, &f, sc, again))
		f.o.Seed++
	}
	return code
}

// one runs a scenario and makes it smaller if it fails.
func one(ctx context.Context, f *flags, sc *sim.Scenario, again string) int {
	r := sim.Run{CheckEvery: f.check, Context: ctx}
	if f.trace {
		r.Trace = func(format string, args ...any) { fmt.Printf(format+"\n", args...) }
	}
	start, cpu := time.Now(), used()
	report, err := sim.Simulate(sc, r)
	took, cpu := time.Since(start), used()-cpu
	per := float64(cpu.Microseconds()) / float64(max(report.Requests, 1))
	if f.json {
		json.NewEncoder(os.Stdout).Encode(struct {
			sim.Report
			Took float64 `json:"took_seconds"`
			CPU  float64 `json:"cpu_seconds"`
			Per  float64 `json:"cpu_microseconds_a_request"`
			Err  string  `json:"error,omitempty"`
		}{report, took.Seconds(), cpu.Seconds(), per, text(err)})
	} else {
		report.Write(os.Stdout)
		fmt.Printf("  took %.1f s, %.1f s of CPU: %.0f µs a request\n", took.Seconds(), cpu.Seconds(), per)
	}
	if err == nil {
		return 0
	}
	fmt.Fprintf(os.Stderr, "sim: %v\nrun it again: %s\n", err, again)
	var v *sim.Violation
	if errors.As(err, &v) && f.minimise > 0 && !f.trace {
		smaller(ctx, f, sc, v)
	}
	return 1
}

// used is the CPU time of this process so far.
func used() time.Duration {
	var u syscall.Rusage
	syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func text(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// smaller prints the smallest scenario that fails in the same way, and its trace.
func smaller(ctx context.Context, f *flags, sc *sim.Scenario, v *sim.Violation) {
	end := time.Now().Add(f.minimise)
	sc, v = sim.Minimise(sc, v, sim.Run{CheckEvery: f.check, Context: ctx}, func() bool { return time.Now().Before(end) && ctx.Err() == nil })
	fmt.Printf("---- the smallest that was found (%d requests, %d faults): %v\n", len(sc.Requests), len(sc.Faults), v)
	sc.Write(os.Stdout)
	fmt.Println("---- what happens")
	sim.Simulate(sc, sim.Run{CheckEvery: 1, Trace: func(format string, args ...any) { fmt.Printf(format+"\n", args...) }})
	if f.out == "" {
		return
	}
	file, err := os.Create(f.out)
	if err == nil {
		fmt.Fprintf(file, "# %v\n", v)
		err = errors.Join(sc.Write(file), file.Close())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "sim:", err)
	}
}
