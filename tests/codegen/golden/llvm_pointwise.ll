; test
@tc_nowhere = internal constant [64 x i8] zeroinitializer, align 64
declare <16 x float> @Sleef_logf16_u10(<16 x float>) memory(none) nounwind willreturn
declare <16 x float> @llvm.masked.load.v16f32.p0(ptr, <16 x i1>, <16 x float>)
declare i32 @tc_parallel_for(i64, i64, i64, ptr, ptr)
declare void @llvm.masked.store.v16f32.p0(<16 x float>, ptr, <16 x i1>)

define internal void @kernel_0.parallel_0.body(ptr noalias readonly %A.arg0, ptr noalias %B.arg1, ptr %status, i64 %low, i64 %high) #0 {
entry:
  br label %body
body:
  br label %loop.trip.1
loop.trip.1:
  %trip.1 = phi i64 [ %low, %body ], [ %trip.1.next, %loop.trip.1 ]
  %t.2 = mul i64 %trip.1, 45
  %t.3 = getelementptr float, ptr %A.arg0, i64 %t.2
  %t.4 = load <16 x float>, ptr %t.3, align 4
  %t.5 = fmul contract <16 x float> %t.4, splat (float 0x3FE0000000000000)
  %t.6 = call <16 x float> @Sleef_logf16_u10(<16 x float> %t.5)
  %t.7 = getelementptr float, ptr %B.arg1, i64 %t.2
  store <16 x float> %t.6, ptr %t.7, align 4
  %t.8 = getelementptr float, ptr %t.3, i64 16
  %t.9 = load <16 x float>, ptr %t.8, align 4
  %t.10 = fmul contract <16 x float> %t.9, splat (float 0x3FE0000000000000)
  %t.11 = call <16 x float> @Sleef_logf16_u10(<16 x float> %t.10)
  %t.12 = getelementptr float, ptr %t.7, i64 16
  store <16 x float> %t.11, ptr %t.12, align 4
  %t.13 = getelementptr float, ptr %t.3, i64 32
  %t.14 = call <16 x float> @llvm.masked.load.v16f32.p0(ptr align 4 %t.13, <16 x i1> <i1 true, i1 true, i1 true, i1 true, i1 true, i1 true, i1 true, i1 true, i1 true, i1 true, i1 true, i1 true, i1 true, i1 false, i1 false, i1 false>, <16 x float> zeroinitializer)
  %t.15 = fmul contract <16 x float> %t.14, splat (float 0x3FE0000000000000)
  %t.16 = call <16 x float> @Sleef_logf16_u10(<16 x float> %t.15)
  %t.17 = getelementptr float, ptr %t.7, i64 32
  call void @llvm.masked.store.v16f32.p0(<16 x float> %t.16, ptr align 4 %t.17, <16 x i1> <i1 true, i1 true, i1 true, i1 true, i1 true, i1 true, i1 true, i1 true, i1 true, i1 true, i1 true, i1 true, i1 true, i1 false, i1 false, i1 false>)
  %trip.1.next = add nsw i64 %trip.1, 1
  %t.18 = icmp slt i64 %trip.1.next, %high
  br i1 %t.18, label %loop.trip.1, label %end.trip.1
end.trip.1:
  ret void
}

define internal void @kernel_0.parallel_0(i64 %low, i64 %high, ptr %context) #0 {
  %slot0 = getelementptr { ptr, ptr, ptr }, ptr %context, i32 0, i32 0
  %value0 = load ptr, ptr %slot0
  %slot1 = getelementptr { ptr, ptr, ptr }, ptr %context, i32 0, i32 1
  %value1 = load ptr, ptr %slot1
  %slot2 = getelementptr { ptr, ptr, ptr }, ptr %context, i32 0, i32 2
  %value2 = load ptr, ptr %slot2
  call void @kernel_0.parallel_0.body(ptr %value0, ptr %value1, ptr %value2, i64 %low, i64 %high)
  ret void
}

define internal void @kernel_0(ptr noalias readonly %A.arg0, ptr noalias %B.arg1, ptr %status) #0 {
entry:
  %context.1 = alloca { ptr, ptr, ptr }
  br label %body
body:
  %t.2 = getelementptr { ptr, ptr, ptr }, ptr %context.1, i32 0, i32 0
  store ptr %A.arg0, ptr %t.2
  %t.3 = getelementptr { ptr, ptr, ptr }, ptr %context.1, i32 0, i32 1
  store ptr %B.arg1, ptr %t.3
  %t.4 = getelementptr { ptr, ptr, ptr }, ptr %context.1, i32 0, i32 2
  store ptr %status, ptr %t.4
  %t.5 = call i32 @tc_parallel_for(i64 0, i64 20, i64 1, ptr @kernel_0.parallel_0, ptr %context.1)
  %t.6 = icmp ne i32 %t.5, 0
  %t.10 = getelementptr i64, ptr %status, i64 1
  br i1 %t.6, label %then.if.7, label %end.if.7
then.if.7:
  %t.8 = cmpxchg ptr %status, i64 0, i64 -2 monotonic monotonic
  %t.9 = extractvalue { i64, i1 } %t.8, 1
  br i1 %t.9, label %then.if.11, label %end.if.11
then.if.11:
  store i64 0, ptr %t.10
  br label %end.if.11
end.if.11:
  br label %end.if.7
end.if.7:
  ret void
}

define i64 @tc_entry(ptr %arguments) #0 {
  %slot0 = getelementptr ptr, ptr %arguments, i64 0
  %address0 = load ptr, ptr %slot0
  %slot1 = getelementptr ptr, ptr %arguments, i64 1
  %address1 = load ptr, ptr %slot1
  %status.slot = getelementptr ptr, ptr %arguments, i64 2
  %status = load ptr, ptr %status.slot
  store i64 0, ptr %status
  call void @kernel_0(ptr %address0, ptr %address1, ptr %status)
  %failed0 = load i64, ptr %status
  %stop0 = icmp ne i64 %failed0, 0
  br i1 %stop0, label %failure0, label %next0
failure0:
  ret i64 %failed0
next0:
  ret i64 0
}
attributes #0 = { nounwind "stackrealign" "prefer-vector-width"="512" "min-legal-vector-width"="512" }
!0 = !{i32 1}
