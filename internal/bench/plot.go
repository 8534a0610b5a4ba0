package bench

import (
	"fmt"
	"html/template"
	"io"
	"math"
	"strings"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// plot is the latencies of one measurement's sides.
type plot struct {
	what   string
	curves []curve
}

type curve struct {
	name string
	hist *hdrhistogram.Histogram
}

// Size of a plot's drawing area, and its margins.
const (
	plotWide, plotHigh = 760.0, 300.0
	plotLeft, plotTop  = 60.0, 30.0
)

var colours = []string{"#0b7285", "#c92a2a", "#5f3dc4", "#2b8a3e"}

// percentiles are the marks of the x axis: a hyperbolic scale, as HDR
// histograms are usually drawn.
var percentiles = []float64{0, 50, 90, 99, 99.9, 99.99}

// WritePlot writes a page that needs no other file: the rows, and for each
// measurement its latencies by percentile.
func (r *Report) WritePlot(w io.Writer) error {
	var plots strings.Builder
	for _, p := range r.plots {
		p.svg(&plots)
	}
	return page.Execute(w, struct {
		*Report
		Plots template.HTML
	}{r, template.HTML(plots.String())})
}

func (p plot) svg(b *strings.Builder) {
	lo, hi := math.Inf(1), 0.0
	for _, c := range p.curves {
		lo, hi = min(lo, quantile(c.hist, 0)), max(hi, quantile(c.hist, 100))
	}
	lo, hi = math.Floor(math.Log10(max(lo, 1))), math.Ceil(math.Log10(max(hi, 10)))
	x := func(q float64) float64 { return plotLeft + plotWide*-math.Log10(max(1-q/100, 1e-4))/4 }
	y := func(us float64) float64 {
		return plotTop + plotHigh*(1-(math.Log10(max(us, 1))-lo)/max(hi-lo, 1))
	}
	fmt.Fprintf(b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %.0f %.0f" font-family="sans-serif" font-size="12">`, plotLeft+plotWide+30, plotTop+plotHigh+30)
	fmt.Fprintf(b, `<text x="%.0f" y="16" font-weight="bold">%s</text>`, plotLeft, template.HTMLEscapeString(p.what))
	for _, q := range percentiles {
		fmt.Fprintf(b, `<path d="M%.1f %.1fV%.1f" stroke="#ddd"/><text x="%.1f" y="%.1f" text-anchor="middle">%g %%</text>`, x(q), plotTop, plotTop+plotHigh, x(q), plotTop+plotHigh+18, q)
	}
	for e := lo; e <= hi; e++ {
		us := math.Pow(10, e)
		fmt.Fprintf(b, `<path d="M%.1f %.1fH%.1f" stroke="#ddd"/><text x="%.1f" y="%.1f" text-anchor="end">%v</text>`, plotLeft, y(us), plotLeft+plotWide, plotLeft-6, y(us)+4, time.Duration(us*1e3))
	}
	for i, c := range p.curves {
		colour := colours[i%len(colours)]
		fmt.Fprintf(b, `<polyline fill="none" stroke="%s" stroke-width="2" points="`, colour)
		for step := 0.0; step <= 4; step += 0.05 {
			q := 100 * (1 - math.Pow(10, -step))
			fmt.Fprintf(b, "%.1f,%.1f ", x(q), y(quantile(c.hist, q)))
		}
		fmt.Fprintf(b, `"/><text x="%.1f" y="%.1f" fill="%s">%s, %d requests</text>`, plotLeft+8, plotTop+18+16*float64(i), colour, template.HTMLEscapeString(c.name), c.hist.TotalCount())
	}
	b.WriteString("</svg>\n")
}

var page = template.Must(template.New("page").Funcs(template.FuncMap{"figure": figure, "span": span}).Parse(`<!doctype html>
<meta charset="utf-8"><title>berth bench {{.Bench}}</title>
<style>body{font:15px sans-serif;max-width:80em;margin:2em auto}td,th{padding:.2em .8em;text-align:left;border-bottom:1px solid #ddd}svg{max-width:60em;display:block;margin:1em 0}</style>
<h1>berth bench {{.Bench}}</h1><p>{{.Machine}}; {{.Machine.Started}}</p>
<table><tr><th>what<th>figure<th>95 %<th>against<th>its figure<th>ratio<th>95 %<th>checks</tr>
{{range .Rows}}<tr><td>{{.Name}}<td>{{figure .Value}} {{.Unit}}<td>{{span .CI}}<td>{{.Against}}<td>{{with .Baseline}}{{figure .}}{{end}}<td>{{with .Ratio}}{{figure .}}{{end}}<td>{{span .RatioCI}}<td>{{.Checks}}</tr>
{{end}}</table>{{range .Notes}}<p>{{.}}</p>{{end}}
{{with .Plots}}<h2>Latencies by percentile</h2>{{.}}{{end}}
`))
