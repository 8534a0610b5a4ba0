package bench

import (
	"encoding/json"
	"fmt"
	"io"
	"text/tabwriter"
)

// Report is the outcome of one benchmark, as --json prints it.
type Report struct {
	Bench   string   `json:"bench"`
	Rows    []Row    `json:"rows"`
	Machine Machine  `json:"machine"`
	Notes   []string `json:"notes,omitempty"` // what a reader must know to believe the rows

	curves []curve // for the plot
}

// Row is one figure. Baseline is the reference's, measured in the same run, and
// Ratio is Value by Baseline: the mean over the repetitions, each with its
// neighbour. The intervals hold the mean with 95 % confidence.
type Row struct {
	Name     string      `json:"name"`
	Value    float64     `json:"value"`
	Unit     string      `json:"unit"`
	CI       *[2]float64 `json:"ci95,omitempty"`
	Baseline *float64    `json:"baseline,omitempty"`
	Ratio    *float64    `json:"ratio,omitempty"`
	RatioCI  *[2]float64 `json:"ratio_ci95,omitempty"`
}

// add adds a figure measured once in each repetition; theirs may be empty.
func (r *Report) add(name, unit string, ours, theirs []float64) {
	row := Row{Name: name, Unit: unit, Value: mean(ours), CI: interval(ours)}
	if len(theirs) == len(ours) && len(ours) > 0 {
		b := mean(theirs)
		ratios := make([]float64, len(ours))
		for i := range ours {
			ratios[i] = ours[i] / theirs[i]
		}
		ratio := mean(ratios)
		row.Baseline, row.Ratio, row.RatioCI = &b, &ratio, interval(ratios)
	}
	r.Rows = append(r.Rows, row)
}

func (r *Report) note(format string, args ...any) {
	r.Notes = append(r.Notes, fmt.Sprintf(format, args...))
}

// WriteJSON writes the report as one JSON object.
func (r *Report) WriteJSON(w io.Writer) error { return json.NewEncoder(w).Encode(r) }

// WriteText writes the report for people.
func (r *Report) WriteText(w io.Writer) error {
	fmt.Fprintln(w, r.Machine)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "WHAT\tFIGURE\t95 %\tREFERENCE\tRATIO\t95 %")
	for _, row := range r.Rows {
		base, ratio := "", ""
		if row.Baseline != nil {
			base, ratio = figure(*row.Baseline)+" "+row.Unit, figure(*row.Ratio)
		}
		fmt.Fprintf(t, "%s\t%s %s\t%s\t%s\t%s\t%s\n", row.Name, figure(row.Value), row.Unit, span(row.CI), base, ratio, span(row.RatioCI))
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
