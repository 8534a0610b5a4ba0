package bench

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"text/tabwriter"
)

// Report is the outcome of one benchmark, as --json prints it.
type Report struct {
	Bench   string   `json:"bench"`
	Rows    []Row    `json:"rows"`
	Machine Machine  `json:"machine"`
	Notes   []string `json:"notes,omitempty"` // what a reader must know to believe the rows

	plots []plot
}

// Row is one figure: the mean over the turns. Baseline is that of Against,
// measured in the same run, and Ratio the geometric mean over the turns of each
// by its neighbour, which is not exactly Value by Baseline. The intervals hold
// the means with 95 % confidence.
type Row struct {
	Name     string      `json:"name"` // what was measured, and after ": " the metric
	Value    float64     `json:"value"`
	Unit     string      `json:"unit"`
	CI       *[2]float64 `json:"ci95,omitempty"`
	Against  string      `json:"against,omitempty"`
	Baseline *float64    `json:"baseline"` // null: there is none
	Ratio    *float64    `json:"ratio"`
	RatioCI  *[2]float64 `json:"ratio_ci95,omitempty"`
	Checks   string      `json:"checks"` // of checksums, generations and fences: which were on
}

// add adds a figure measured once in each turn; theirs may be empty, and gives a
// ratio if both are all above 0.
func (r *Report) add(name, unit, checks, against string, ours, theirs []float64) {
	row := Row{Name: name, Unit: unit, Value: mean(ours), CI: interval(ours), Checks: checks}
	if len(theirs) == len(ours) && positive(ours) && positive(theirs) {
		b := mean(theirs)
		logs := make([]float64, len(ours))
		for i := range ours {
			logs[i] = math.Log(ours[i] / theirs[i])
		}
		ratio := math.Exp(mean(logs))
		row.Against, row.Baseline, row.Ratio = against, &b, &ratio
		if ci := interval(logs); ci != nil {
			row.RatioCI = &[2]float64{math.Exp(ci[0]), math.Exp(ci[1])}
		}
	}
	r.Rows = append(r.Rows, row)
}

func positive(v []float64) bool {
	return len(v) > 0 && slices.Min(v) > 0
}

func (r *Report) note(format string, args ...any) {
	r.Notes = append(r.Notes, fmt.Sprintf(format, args...))
}

// WriteJSON writes the report as one JSON object.
func (r *Report) WriteJSON(w io.Writer) error { return json.NewEncoder(w).Encode(r) }

// WriteText writes the report for people: the rows of one measurement under its
// name.
func (r *Report) WriteText(w io.Writer) error {
	fmt.Fprintln(w, r.Machine)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "WHAT\tFIGURE\t95 %\tAGAINST\tITS FIGURE\tRATIO\t95 %")
	last := ""
	for _, row := range r.Rows {
		at := max(strings.LastIndex(row.Name, ": "), 0)
		if what := row.Name[:at]; what != last {
			fmt.Fprintf(t, "%s [%s]\n", what, row.Checks)
			last = what
		}
		base, ratio := "", ""
		if row.Baseline != nil {
			base, ratio = figure(*row.Baseline), figure(*row.Ratio)
		}
		fmt.Fprintf(t, "  %s\t%s %s\t%s\t%s\t%s\t%s\t%s\n", strings.TrimPrefix(row.Name[at:], ": "), figure(row.Value), row.Unit, span(row.CI), row.Against, base, ratio, span(row.RatioCI))
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for _, n := range r.Notes {
		if _, err := fmt.Fprintln(w, "note:", n); err != nil {
			return err
		}
	}
	return nil
}

func figure(v float64) string {
	switch {
	case v == 0:
		return "0"
	case v >= 100 || v <= -100:
		return fmt.Sprintf("%.0f", v)
	}
	return fmt.Sprintf("%.3g", v)
}

func span(ci *[2]float64) string {
	if ci == nil {
		return ""
	}
	return figure(ci[0]) + "–" + figure(ci[1])
}
