"""The defs that are timed, in the TC language, as a user would write them."""

from __future__ import annotations

MATMUL = """
def matmul(float(M,K) A, float(K,N) B) -> (C) {
    C(m,n) +=! A(m,k) * B(k,n)
}"""

MATMUL_F64 = """
def matmul(double(M,K) A, double(K,N) B) -> (C) {
    C(m,n) +=! A(m,k) * B(k,n)
}"""

TMM = """
def tmm(float(M,K) A, float(N,K) B) -> (C) {
    C(m,n) +=! A(m,k) * B(n,k)
}"""

TBMM = """
def tbmm(float(B,N,M) X, float(B,K,M) Y) -> (Z) {
    Z(b,n,k) +=! X(b,n,m) * Y(b,k,m)
}"""

C3 = """
def C3(float(B,WX) I, float(WY,WX) W) -> (O) {
    O(b,wy) +=! I(b,wx) * W(wy,wx)
}"""

KRONECKER = """
def kronecker3(float(D0,N0) W0, float(D1,N1) W1, float(D2,N2) W2, float(M,N0,N1,N2) X) -> (Y) {
    T2(m,n0,n1,d2) +=! X(m,n0,n1,n2) * W2(d2,n2)
    T1(m,n0,d1,d2) +=! T2(m,n0,n1,d2) * W1(d1,n1)
    Y(m,d0,d1,d2) +=! T1(m,n0,d1,d2) * W0(d0,n0)
}"""

MLP1 = """
def mlp1(float(B,M) I, float(N,M) W1, float(N) B1) -> (O1) {
    O1(b,n) = B1(n)
    O1(b,n) += I(b,m) * W1(n,m)
    O1(b,n) = fmaxf(O1(b,n), 0)
}"""

MLP3 = """
def mlp3(float(B,N) I, float(O,N) W2, float(O) B2, float(P,O) W3, float(P) B3, float(Q,P) W4, float(Q) B4) -> (O4) {
    O2(b,o) = B2(o)
    O2(b,o) += I(b,n) * W2(o,n)
    O2(b,o) = fmaxf(O2(b,o), 0)
    O3(b,p) = B3(p)
    O3(b,p) += O2(b,o) * W3(p,o)
    O3(b,p) = fmaxf(O3(b,p), 0)
    O4(b,q) = B4(q)
    O4(b,q) += O3(b,p) * W4(q,p)
    O4(b,q) = fmaxf(O4(b,q), 0)
}"""

GCONV = """
def gconv(float(N,G,C,H,W) I, float(G,F,C,KH,KW) W1, float(G,F) B) -> (O) {
    O(n,g,f,h,w) +=! I(n,g,c,h+kh,w+kw) * W1(g,f,c,kh,kw)
    O(n,g,f,h,w) = O(n,g,f,h,w) + B(g,f)
}"""

CONV2D = """
def conv2d(float(N,C,H,W) I, float(O,C,KH,KW) W1, float(O) B) -> (out) {
    out(n,o,h,w) = B(o)
    out(n,o,h,w) += I(n,c,h+kh,w+kw) * W1(o,c,kh,kw)
}"""

CONV2D_STRIDE2 = """
def conv2d(float(N,C,H,W) I, float(O,C,KH,KW) W1, float(O) B) -> (out) {
    out(n,o,h,w) +=! I(n,c,2*h+kh,2*w+kw) * W1(o,c,kh,kw)
    out(n,o,h,w) = out(n,o,h,w) + B(o)
}"""

LUT1 = """
def lut1(float(E,D) LUT, int32(B,L) I) -> (O) {
    O(b,d) +=! LUT(I(b,l),d)
}"""

LUT2 = """
def lut2(float(E1,D) LUT1, float(E2,D) LUT2, int32(B,L1) I1, int32(B,L2) I2) -> (O1, O2) {
    O1(b,d) +=! LUT1(I1(b,l1),d)
    O2(b,d) +=! LUT2(I2(b,l2),d)
}"""

SOFTMAX = """
def softmax(float(N,D) x) -> (out) {
    peak(n) max=! x(n,d)
    e(n,d) = exp(x(n,d) - peak(n))
    total(n) +=! e(n,d)
    out(n,d) = e(n,d) / total(n)
}"""

LAYERNORM = """
def layernorm(float(N,D) x, float(D) weight, float(D) bias) -> (out) {
    mean(n) +=! x(n,d)
    mean(n) = mean(n) / D
    variance(n) +=! (x(n,d) - mean(n)) * (x(n,d) - mean(n))
    scale(n) = rsqrt(variance(n) / D + 1e-5)
    out(n,d) = (x(n,d) - mean(n)) * scale(n) * weight(d) + bias(d)
}"""

RMSNORM_SWIGLU = """
def rmsnorm_swiglu(float(N,D) x, float(N,D) gate, float(D) weight) -> (out) {
    square(n) +=! x(n,d) * x(n,d)
    scale(n) = rsqrt(square(n) / D + 1e-6)
    out(n,d) = x(n,d) * scale(n) * weight(d) * gate(n,d) * sigmoid(gate(n,d))
}"""

MOMENTS = """
def moments(float(N,K) I) -> (mean, var) {
    mean(n) +=! I(n,k)
    var(n) +=! I(n,k) * I(n,k)
    mean(n) = mean(n) / K
    var(n) = var(n) / K - mean(n) * mean(n)
}"""

BATCHNORM = """
def batchnorm(float(N,C,H,W) x, float(C) weight, float(C) bias) -> (out) {
    mean(c) +=! x(n,c,h,w)
    mean(c) = mean(c) / (N*H*W)
    variance(c) +=! (x(n,c,h,w) - mean(c)) * (x(n,c,h,w) - mean(c))
    scale(c) = rsqrt(variance(c) / (N*H*W) + 1e-5) * weight(c)
    out(n,c,h,w) = (x(n,c,h,w) - mean(c)) * scale(c) + bias(c)
}"""

GROUPNORM = """
def groupnorm(float(N,G,D,H,W) x, float(G,D) weight, float(G,D) bias) -> (out) {
    sum(n,g) +=! x(n,g,d,h,w)
    square(n,g) +=! x(n,g,d,h,w) * x(n,g,d,h,w)
    mean(n,g) = sum(n,g) / (D*H*W)
    scale(n,g) = rsqrt(square(n,g) / (D*H*W) - mean(n,g) * mean(n,g) + 1e-5)
    out(n,g,d,h,w) = (x(n,g,d,h,w) - mean(n,g)) * scale(n,g) * weight(g,d) + bias(g,d)
}"""

MAXPOOL = """
def maxpool(float(N,C,H,W) x) -> (out) {
    out(n,c,h,w) max=! x(n,c,2*h+kh,2*w+kw) where kh in 0:2, kw in 0:2
}"""

AVGPOOL = """
def avgpool(float(N,C,H,W) x) -> (out) {
    out(n,c,h,w) +=! x(n,c,h+kh,w+kw) * (1.0 / 9) where kh in 0:3, kw in 0:3
}"""

TRANSPOSE = """
def transpose(float(M,N) x) -> (out) {
    out(n,m) = x(m,n)
}"""

HEADS = """
def heads(float(B,T,H,D) x) -> (out) {
    out(b,h,t,d) = x(b,t,h,d)
}"""

CHANNELS_LAST = """
def channels_last(float(N,C,H,W) x) -> (out) {
    out(n,h,w,c) = x(n,c,h,w)
}"""

COPY = """
def copy(float(M,N) x) -> (out) {
    out(m,n) = x(m,n)
}"""

GELU_TANH = """
def gelu(float(M,N) x) -> (out) {
    out(m,n) = 0.5 * x(m,n) * (1 + tanh(0.7978845608 * (x(m,n) + 0.044715 * x(m,n) * x(m,n) * x(m,n))))
}"""

GELU_RESIDUAL = """
def gelu_residual(float(M,N) x, float(M,N) residual) -> (out) {
    out(m,n) = residual(m,n) + 0.5 * x(m,n) * (1 + erf(x(m,n) * 0.7071067812))
}"""

MUL_ADD_TANH = """
def mul_add_tanh(float(M,N) a, float(M,N) b, float(M,N) c) -> (out) {
    out(m,n) = tanh(a(m,n) * b(m,n) + c(m,n))
}"""

BIAS_RELU_ADD = """
def bias_relu_add(float(M,N) x, float(N) bias, float(M,N) residual) -> (out) {
    out(m,n) = relu(x(m,n) + bias(n)) + residual(m,n)
}"""

ADD = """
def add(float(M,N) a, float(M,N) b) -> (out) {
    out(m,n) = a(m,n) + b(m,n)
}"""
