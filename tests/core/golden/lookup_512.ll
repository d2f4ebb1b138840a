; f
@tc_nowhere = internal constant [64 x i8] zeroinitializer, align 64
declare <16 x float> @llvm.masked.load.v16f32.p0(ptr, <16 x i1>, <16 x float>)
declare void @llvm.masked.store.v16f32.p0(<16 x float>, ptr, <16 x i1>)

define internal void @kernel_0(ptr noalias readonly %a1.arg0, ptr %status) #0 {
entry:
  br label %body
body:
  %t.11 = getelementptr i64, ptr %status, i64 1
  br label %loop.i0.1
loop.i0.1:
  %i0.1 = phi i64 [ 0, %body ], [ %i0.1.next, %end.if.8 ]
  %t.2 = getelementptr i64, ptr %a1.arg0, i64 %i0.1
  %t.3 = load i64, ptr %t.2, align 8
  %t.4 = icmp sge i64 %t.3, 0
  %t.5 = icmp slt i64 %t.3, 50
  %t.6 = and i1 %t.4, %t.5
  %t.7 = xor i1 %t.6, true
  br i1 %t.7, label %then.if.8, label %end.if.8
then.if.8:
  %t.9 = cmpxchg ptr %status, i64 0, i64 1 monotonic monotonic
  %t.10 = extractvalue { i64, i1 } %t.9, 1
  br i1 %t.10, label %then.if.12, label %end.if.12
then.if.12:
  store i64 %t.3, ptr %t.11
  br label %end.if.12
end.if.12:
  br label %end.if.8
end.if.8:
  %i0.1.next = add nsw i64 %i0.1, 1
  %t.13 = icmp slt i64 %i0.1.next, 6
  br i1 %t.13, label %loop.i0.1, label %end.i0.1
end.i0.1:
  ret void
}

define internal void @kernel_1(ptr noalias readonly %a0.arg0, ptr noalias readonly %a1.arg1, ptr noalias %a2.arg2, ptr %status) #0 {
entry:
  br label %body
body:
  br label %loop.tile.1
loop.tile.1:
  %tile.1 = phi i64 [ 0, %body ], [ %tile.1.next, %loop.tile.1 ]
  %t.2 = getelementptr i64, ptr %a1.arg1, i64 %tile.1
  %t.3 = load i64, ptr %t.2, align 8
  %t.4 = mul i64 %t.3, 20
  %t.5 = getelementptr float, ptr %a0.arg0, i64 %t.4
  %t.6 = freeze ptr %t.5
  %t.7 = load <16 x float>, ptr %t.6, align 4
  %t.8 = mul i64 %tile.1, 20
  %t.9 = getelementptr float, ptr %a2.arg2, i64 %t.8
  store <16 x float> %t.7, ptr %t.9, align 4
  %t.10 = getelementptr float, ptr %t.6, i64 16
  %t.11 = call <16 x float> @llvm.masked.load.v16f32.p0(ptr align 4 %t.10, <16 x i1> <i1 true, i1 true, i1 true, i1 true, i1 false, i1 false, i1 false, i1 false, i1 false, i1 false, i1 false, i1 false, i1 false, i1 false, i1 false, i1 false>, <16 x float> zeroinitializer)
  %t.12 = getelementptr float, ptr %t.9, i64 16
  call void @llvm.masked.store.v16f32.p0(<16 x float> %t.11, ptr align 4 %t.12, <16 x i1> <i1 true, i1 true, i1 true, i1 true, i1 false, i1 false, i1 false, i1 false, i1 false, i1 false, i1 false, i1 false, i1 false, i1 false, i1 false, i1 false>)
  %tile.1.next = add nsw i64 %tile.1, 1
  %t.13 = icmp slt i64 %tile.1.next, 6
  br i1 %t.13, label %loop.tile.1, label %end.tile.1
end.tile.1:
  ret void
}

define i64 @tc_entry(ptr %arguments) #0 {
  %slot0 = getelementptr ptr, ptr %arguments, i64 0
  %address0 = load ptr, ptr %slot0
  %slot1 = getelementptr ptr, ptr %arguments, i64 1
  %address1 = load ptr, ptr %slot1
  %slot2 = getelementptr ptr, ptr %arguments, i64 2
  %address2 = load ptr, ptr %slot2
  %status.slot = getelementptr ptr, ptr %arguments, i64 3
  %status = load ptr, ptr %status.slot
  store i64 0, ptr %status
  call void @kernel_0(ptr %address1, ptr %status)
  %failed0 = load i64, ptr %status
  %stop0 = icmp ne i64 %failed0, 0
  br i1 %stop0, label %failure0, label %next0
failure0:
  ret i64 %failed0
next0:
  call void @kernel_1(ptr %address0, ptr %address1, ptr %address2, ptr %status)
  ret i64 0
}
attributes #0 = { nounwind "stackrealign" "prefer-vector-width"="512" "min-legal-vector-width"="512" }
!0 = !{i32 1}
