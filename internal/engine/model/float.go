package model

import "math"

// The conversions float32(a*b) below look idle; they forbid the compiler to
// fuse the product with the addition that follows, which would round
// differently on machines that can.

// multiply sets out = matrix x in, where matrix is [len(out)][len(in)]. Each
// output is one running sum in index order; four rows at a time only share the
// loads of in.
func multiply(out, matrix, in []float32) {
	n := len(in)
	r := 0
	for ; r+4 <= len(out); r += 4 {
		a := matrix[r*n:][:n]
		b := matrix[(r+1)*n:][:n]
		c := matrix[(r+2)*n:][:n]
		d := matrix[(r+3)*n:][:n]
		var sa, sb, sc, sd float32
		for i, x := range in {
			sa += float32(a[i] * x)
			sb += float32(b[i] * x)
			sc += float32(c[i] * x)
			sd += float32(d[i] * x)
		}
		out[r], out[r+1], out[r+2], out[r+3] = sa, sb, sc, sd
	}
	for ; r < len(out); r++ {
		out[r] = dot(in, matrix[r*n:])
	}
}

// dot returns the sum of a[i]*b[i] over a, in index order.
func dot(a, b []float32) float32 {
	b = b[:len(a)]
	var s float32
	for i, x := range a {
		s += float32(x * b[i])
	}
	return s
}

func add(dst, src []float32) {
	for i, v := range src[:len(dst)] {
		dst[i] += v
	}
}

// normalize is RMSNorm with a gain of 1.
func normalize(dst, src []float32) {
	mean := dot(src, src) / float32(len(src))
	scale := float32(1 / math.Sqrt(float64(mean)+1e-6))
	for i, v := range src {
		dst[i] = v * scale
	}
}

// softmax replaces the scores by their exponentials and returns the sum of
// these, which is at least 1.
func softmax(scores []float32) (sum float32) {
	top := scores[0]
	for _, v := range scores {
		top = max(top, v)
	}
	for i, v := range scores {
		e := exp(v - top)
		scores[i] = e
		sum += e
	}
	return sum
}

func silu(v float32) float32 { return v / (1 + exp(-v)) }

// exp is e^v. The standard library's differs between CPUs of one architecture
// (it uses fused operations where there are some), this one does not:
// 2^k x 2^f with |f| <= 1/2, and a Taylor polynomial for the second factor,
// whose error is below that of a float32.
func exp(v float32) float32 {
	switch {
	case v > 88:
		v = 88
	case v < -87:
		return 0
	case v != v:
		return v
	}
	x := float64(float64(v) * math.Log2E)
	k := math.Floor(x + 0.5)
	f := float64((x - k) * math.Ln2)
	p := 1.0
	for i := 7.0; i >= 1; i-- {
		p = 1 + float64(float64(f*p)*inverse[int(i)])
	}
	return float32(p * math.Float64frombits(uint64(int64(k)+1023)<<52))
}

// inverse[i] is 1/i.
var inverse = [8]float64{1, 1, 1. / 2, 1. / 3, 1. / 4, 1. / 5, 1. / 6, 1. / 7}

// random is a splitmix64 generator: the same numbers everywhere, for ever.
type random uint64

// unit returns a number in [-1, 1).
func (r *random) unit() float32 {
	*r += 0x9e3779b97f4a7c15
	z := uint64(*r)
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	z ^= z >> 31
	return float32(int64(z)>>40) / (1 << 23)
}

// matrix returns [rows][cols] weights that keep the size of a normalised
// input, times scale: uniform with variance scale²/cols.
func (r *random) matrix(rows, cols int, scale float64) []float32 {
	limit := float32(scale * math.Sqrt(3/float64(cols)))
	m := make([]float32, rows*cols)
	for i := range m {
		m[i] = r.unit() * limit
	}
	return m
}
